"""The memory of this machine that a run may plan for."""

import gc
from pathlib import Path

_SHARE = 0.85  # of the free memory: estimates err, and other processes allocate too
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")


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


def system_bytes() -> int:
    """Return the bytes of system memory that may be planned for, within the limit of a container."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    if _LIMIT.is_file() and _USED.is_file():
        limit = _LIMIT.read_text().strip()
        if limit.isdecimal():  # `max` without a limit
            free = min(free, int(limit) - int(_USED.read_text()))
    return int(_SHARE * free)
