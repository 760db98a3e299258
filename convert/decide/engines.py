"""Names of the engines that kvfold has rules for, and the output formats to try for some of them."""

from collections.abc import Sequence
from typing import Literal, get_args

from ...core.errors import InvalidInput

EngineName = Literal["transformers", "vllm", "sglang", "llama.cpp", "mlx", "tensorrt-llm", "tgi"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
TYING = frozenset({"transformers", "llama.cpp"})  # run the stock class with its embeddings as its head
SERVED = "serving"  # the stock class in the widths that engines have kernels for


def read_engines(text: str | None) -> tuple[str, ...]:
    """Return the engines in a comma-separated list, each once; none where there is no list.

    Raises:
        InvalidInput: the list is empty, or kvfold has no rules for one of them.
    """
    if text is None:
        return ()
    if not text:
        raise InvalidInput(f"the list of engines is empty; choose from: {', '.join(ENGINES)}")
    return check_engines([name.strip() for name in text.split(",")])


def check_engines(names: Sequence[str]) -> tuple[str, ...]:
    """Return the engines of a list, each once.

    Raises:
        InvalidInput: kvfold has no rules for one of them.
    """
    for name in names:
        if name not in ENGINES:
            raise InvalidInput(f"--engine {name!r} is unknown; choose from: {', '.join(ENGINES)}")
    return tuple(dict.fromkeys(names))


def are_served(engines: Sequence[str]) -> bool:
    """Return whether one of the engines runs the stock class in the serving widths only."""
    return any(engine != "transformers" for engine in engines)


def containers_for(engines: Sequence[str], to: str, container: str | None) -> tuple[str, ...]:
    """Return the output formats to try, the least lossy first.

    Args:
        engines: that must run the output; none where no engine was named.
        to: `gqa`, `mqa` or `mla`.
        container: the user's choice of `auto`, `stock` or `remote`; None is `auto`.
    """
    choice = container or "auto"
    if to != "mla" or not are_served(engines):
        return (choice,)
    if choice == "stock":
        return (SERVED,)
    if choice == "remote":
        return ("remote",)
    # Slots of any frequency lose less than those of the stock table, but need code of their own.
    return ("remote", SERVED)
