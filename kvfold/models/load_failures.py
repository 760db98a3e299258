"""Failures of transformers to read a model directory, as one sentence each, and its silence meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from jinja2 import TemplateError

from ..core.errors import InvalidInput
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

# A chat template is a program: it may divide by zero, or call itself without an end (a RuntimeError).
TEMPLATE_FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError,
)  # fmt: skip


def _is_refusal(kind: type[BaseException]) -> bool:
    """Return whether an exception says that a file is not as it should be."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    # tokenizers raises `Exception` itself, and a panic of its Rust code, which derives from BaseException.
    from_tokenizers = kind is Exception or kind.__module__ == "pyo3_runtime"
    return from_tokenizers or issubclass(kind, (*_NAMED, SafetensorError, StrictDataclassError))


@contextmanager
def loading_failures(directory: Path, part: str) -> Iterator[None]:
    """Turn a failure of transformers to read a directory into a sentence.

    Raises:
        InvalidInput: names the directory, the exception and its reason.
    """
    try:
        yield
    except InvalidInput:
        raise
    except BaseException as error:
        if not _is_refusal(type(error)) or is_full(error):  # a full memory is no fault of the files
            raise
        reason = shorten(printable(" ".join(str(error).split())), 200, placeholder=" ...")
        raise InvalidInput(
            f"the {part} of {printable(directory)} cannot be loaded ({type(error).__name__}): {reason}"
        ) from error


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
