"""The border of the Python API: checks of what a caller gives, and messages in the caller's terms."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from .core.console import calling, check_launch
from .core.errors import InvalidInput
from .core.untrusted import shorten

P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the Python API.

    An unknown keyword argument becomes an `InvalidInput`, and messages give arguments their names in Python:
    `kv_budget` for `--kv-budget`. A missing argument stays Python's `TypeError`. The function computes as its
    command does, whatever the caller has set in torch.
    """
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)  # of a method

    def options() -> list[str]:
        if "options" not in parameters:
            return []
        module, name = _SETTINGS[function.__name__]
        return list(getattr(import_module(f"{__package__}.{module}"), name).model_fields)

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            own = _ARGUMENTS.get(name)
            if own in parameters and name not in parameters:
                raise InvalidInput(f"unknown name {name!r}; did you mean {own!r}?")
            known = [*(other for other in parameters if other != "options"), *options()]
            if name not in known:
                from .core.settings import suggest

                own_names = dict.fromkeys(other for other in known if _ARGUMENTS.get(other) not in parameters)
                raise InvalidInput(f"unknown name {name!r}; {suggest(name, own_names, _OTHER_NAMES)}")
        with calling(names=_by_option([*options(), *parameters])), _as_in_a_command():
            check_launch()
            return function(*args, **given)

    return call


@contextmanager
def _as_in_a_command() -> Iterator[None]:
    """Set what torch and numpy have set when a command begins, for the duration."""
    torch: Any = sys.modules.get("torch")
    if torch is None:  # then its user has set nothing either
        yield
        return
    import numpy as np

    dtype = torch.get_default_dtype()
    # torch.get_float32_matmul_precision raises where the caller has set these, its newer names.
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    with ExitStack() as stack:
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        for product in products:
            stack.callback(setattr, product, "fp32_precision", product.fp32_precision)
            product.fp32_precision = "ieee"
        yield


def _by_option(names: Sequence[str]) -> Mapping[str, str]:
    """Return arguments by the options that commands have in their place."""
    found = {f"--{name.replace('_', '-')}": name for name in names}
    # A list is an option that is given several times: `engines` is `--engine`.
    lists = {option.removesuffix("s"): name for option, name in found.items() if option.endswith("s")}
    # `--set teacher=DIR` is a key of the recipe, or of `settings` where there is none; `--lint` leaves a run
    # out.
    others = {
        "target": ("--to", "target"),
        "settings": ("--set", "settings"),
        "recipe": ("--set", "the key"),
        "run": ("--lint", "run=False"),
    }
    return {**lists, **found, **dict(others[name] for name in others if name in names)}


# The arguments of functions, by the names of the fields that they fill.
_ARGUMENTS = {"model": "source", "to": "target"}
# Flags of commands whose values one argument takes.
_OTHER_NAMES = {"quality": "goal", "speed": "goal"}
# The settings whose fields a function takes as `**options`: their module and class.
_SETTINGS = {
    "fold": ("convert.request", "FoldRequest"),
    "plan": ("planning.request", "PlanRequest"),
    "evaluate": ("eval.options", "EvalRequest"),
    "migrate": ("migration.migration_options", "MigrationOptions"),
}


def text_of(value: Any, name: str) -> str:
    """Return the text of a path or of a name, such as a Hub id.

    Raises:
        InvalidInput: it is neither, is empty, or holds a null character.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidInput(f"{name} is {shorten(value)}; it should be a text or a path")
    if not text or "\0" in text:
        raise InvalidInput(f"{name} is {shorten(text)}, which nothing can be called; name another")
    return text


def path_of(value: Any, name: str) -> Path:
    """Return a path, with the home directory for `~`; arguments and errors are those of `text_of`."""
    return Path(text_of(value, name)).expanduser()


def directory_of(value: Any) -> Path:
    """Return the path of a checkpoint's directory.

    Raises:
        InvalidInput: as of `text_of`, or it is no directory.
        OSError: the system has no such names.
    """
    place = path_of(value, "directory")
    if not place.is_dir():
        raise InvalidInput(f"{place} is not a directory; give the directory of a checkpoint")
    return place


def optional_text(value: Any, name: str) -> str | None:
    """Return a text as `text_of` does; None for None."""
    return None if value is None else text_of(value, name)


def optional_path(value: Any, name: str) -> Path | None:
    """Return a path as `path_of` does; None for None."""
    return None if value is None else path_of(value, name)


def directories_of(value: Any) -> list[Path]:
    """Return the paths of an argument `directories`, which is a sequence of them or a single one.

    Raises:
        InvalidInput: it is neither, or as of `text_of`.
    """
    given = [value] if isinstance(value, str | Path) else value
    if not isinstance(given, Sequence):
        raise InvalidInput(f"directories is {shorten(given)}; it should be a list of paths")
    return [path_of(one, "one of directories") for one in given]
