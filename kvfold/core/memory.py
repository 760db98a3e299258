"""The memory of this machine that a run may plan for, and the sentence where it does not suffice."""

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import InvalidInput

_SHARE = 0.85  # of the free memory: estimates err, and other processes allocate too
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
# Words of torch's errors where memory is full; they are of RuntimeError, like most others of torch.
_OF_CPU = "DefaultCPUAllocator"
_FULL = re.compile(rf"out of memory|CUBLAS_STATUS_ALLOC_FAILED|{_OF_CPU}: can't allocate")
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


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Turn torch's error of a full memory, of a GPU or of the system, into one sentence.

    It may be used as a decorator.

    Args:
        remedy: the end of the sentence, which says what takes less memory.

    Raises:
        InvalidInput: memory is full. Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not _FULL.search(text):
            raise
        traceback.clear_frames(error.__traceback__)  # which hold the tensors that filled it
        wanted = _WANTED.search(text)
        more = f" ({wanted[1]} more were needed)" if wanted else ""
        place = "this machine" if _OF_CPU in text else "the GPU"
        raise InvalidInput(f"{place} has too little memory{more}; {remedy}") from None


def system_bytes() -> int:
    """Return the bytes of system memory that may be planned for, within the limit of a container."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    if _LIMIT.is_file() and _USED.is_file():
        limit = _LIMIT.read_text().strip()
        if limit.isdecimal():  # `max` without a limit
            free = min(free, int(limit) - int(_USED.read_text()))
    return int(_SHARE * free)
