"""Failures of transformers to read a model directory, as one sentence each, and its silence meanwhile."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import shorten
from types import TracebackType

from ..core.errors import InvalidInput, bounded
from ..core.memory import is_full
from ..core.untrusted import printable

# The errors of transformers, torch and Python that damaged files cause; RuntimeError covers RecursionError.
_NAMED = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    RuntimeError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
_STYLE = re.compile(r"\x1b\[\d*m")  # by which transformers makes its words bold or coloured


class _Printable(logging.Filter):
    """A filter that makes messages printable, in which transformers quotes names and values of files."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except (
            Exception
        ):  # a call with other arguments than its text takes, which logging reports and no more
            text = str(record.msg)
        lines = _STYLE.sub("", text).splitlines()
        record.msg, record.args = "\n".join(bounded(printable(line)) for line in lines), None
        return True


class _Failures(AbstractContextManager[None]):
    """The context of `loading_failures`."""

    def __init__(self, directory: Path, part: str) -> None:
        self._directory = directory
        self._part = part
        self._filter = _Printable()
        self._handlers: list[logging.Handler] = []

    def __enter__(self) -> None:
        self._handlers = list(logging.getLogger("transformers").handlers)
        for handler in self._handlers:
            handler.addFilter(self._filter)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler in self._handlers:
            handler.removeFilter(self._filter)
        if kind is None or issubclass(kind, InvalidInput) or not _is_refusal(kind):
            return
        if error is not None and is_full(error):  # no fault of the files
            return
        reason = shorten(printable(" ".join(str(error).split())), 200, placeholder=" ...")
        raise InvalidInput(
            f"the {self._part} of {printable(self._directory)} cannot be loaded ({kind.__name__}): {reason}"
        ) from error


def _is_refusal(kind: type[BaseException]) -> bool:
    """Return whether an exception says that a file is not as it should be."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    # tokenizers raises `Exception` itself, and a panic of its Rust code, which derives from BaseException.
    from_tokenizers = kind is Exception or kind.__module__ == "pyo3_runtime"
    return from_tokenizers or issubclass(kind, (*_NAMED, SafetensorError, StrictDataclassError))


def loading_failures(directory: Path, part: str) -> AbstractContextManager[None]:
    """Turn a failure of transformers to read a directory into a sentence.

    What transformers logs meanwhile is made printable, since it quotes names and values of the files.

    Args:
        directory: the checkpoint.
        part: the part that is read, such as `model` or `tokenizer`.

    Raises:
        InvalidInput: names the directory, the exception and its reason.
    """
    return _Failures(directory, part)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers for the duration."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def no_warnings() -> Iterator[None]:
    """Hide the warnings of transformers for the duration."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
