"""The memory of this machine that a run may plan for, and the sentence where it does not suffice."""

import gc
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .errors import InvalidInput

_SHARE = 0.85  # of the free memory: estimates err, and other processes allocate too
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
# Words of torch's errors where memory is full; they are of RuntimeError, like most others of torch.
_OF_CPU = "DefaultCPUAllocator"
_FULL = re.compile(
    rf"out of memory|CU(BLAS|SOLVER)_STATUS_ALLOC_FAILED|{_OF_CPU}: (can't allocate|not enough)"
)
_WANTED = re.compile(r"ried to allocate (\d[\d.]* \w+)")


def free_bytes() -> int:
    """Return the bytes of memory that may be planned for.

    It is the memory of the current GPU if there is one, else of the system. What torch keeps of a GPU for
    later use is given back first: it is free for this process, and other processes can have it from then on.
    """
    import torch

    if not torch.cuda.is_available():
        return system_bytes()
    gc.collect()
    torch.cuda.empty_cache()
    return int(_SHARE * torch.cuda.mem_get_info()[0])


def gpu_bytes() -> int:
    """Return the bytes of the current GPU that may be planned for, whatever is free of them now.

    It is for what must come out alike when a command is given again.
    """
    import torch

    return int(_SHARE * torch.cuda.mem_get_info()[1])


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the memory of a GPU or of the system is full."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _FULL.search(str(error)) is not None
    )


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Turn an error of a full memory, of a GPU or of the system, into one sentence.

    It may be used as a decorator. Of several processes one that fails alone cannot end the others, which wait
    for it; their launcher does. So there the error passes, with the sentence as a note. `remedy` ends the
    sentence: what takes less memory.

    Raises:
        InvalidInput: memory is full. Other errors pass.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_full(error):
            raise
        sentence = f"{_lack(str(error), is_system=isinstance(error, MemoryError))}; {remedy}"
        group = sys.modules.get("torch.distributed")  # to import it would take memory
        if group is not None and group.is_initialized() and group.get_world_size() > 1:
            if sentence not in getattr(error, "__notes__", ()):
                error.add_note(sentence)
            raise
        _release(error)
        raise InvalidInput(sentence) from None


def remedy_of(ways: Mapping[str, bool], last: str) -> str:
    """Return a remedy for `enough_memory` that names only what is left to do.

    `ways` says of each remedy whether it is still left to try; `last` is offered when none is.
    """
    *first, end = [way for way, is_left in ways.items() if is_left] or [last]
    return f"use {', '.join(first)} or {end}" if first else f"use {end}"


def lack_of(output: str) -> str | None:
    """Return that memory is full, by the standard error of a process that ended with a traceback, or None."""
    last = next(reversed(output.strip().splitlines()), "")
    if last.partition(":")[0] == "MemoryError":
        return _lack(last, is_system=True)
    return _lack(last) if _FULL.search(last) else None


def _lack(words: str, *, is_system: bool = False) -> str:
    """Return whose memory is full, and how much more was needed where an error's words say it."""
    wanted = _WANTED.search(words)
    more = f" ({wanted[1]} more were needed)" if wanted else ""
    whose = "this machine" if is_system or _OF_CPU in words else "the GPU"
    return f"{whose} has too little memory{more}"


def _release(error: BaseException) -> None:
    """Free what filled the memory, which the frames of an error and of those behind it hold."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def system_bytes() -> int:
    """Return the bytes of system memory that may be planned for, within the limit of a container."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    if _LIMIT.is_file() and _USED.is_file():
        limit = _LIMIT.read_text().strip()
        if limit.isdecimal():  # `max` without a limit
            free = min(free, int(limit) - int(_USED.read_text()))
    return int(_SHARE * free)
