"""System calls that not every platform has, with what stands in for them.

Linux and macOS have them all. Windows has no `pread`, `pwrite` and `resource`, opens files as text unless it
is asked for bytes, and neither renames nor removes what is open.

No heavy import here: `--help` goes through this module.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOVES_OPEN_FILES = os.name != "nt"
SYNCS_DIRECTORIES = os.name != "nt"
_BINARY = getattr(os, "O_BINARY", 0)
_at_a_time = threading.Lock()  # a descriptor has one position for all threads


def open_bytes(file: str | os.PathLike[str], *, create: bool, within: int | None = None) -> int:
    """Return a descriptor to read and write a file's bytes; a link is not followed.

    `within` is a descriptor of the directory that a relative path starts from; None: the current one.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | _BINARY | getattr(os, "O_NOFOLLOW", 0) | (os.O_CREAT if create else 0)
    return os.open(file, flags, 0o644, dir_fd=within)


@contextmanager
def opened_directory(path: str | os.PathLike[str]) -> Iterator[int | None]:
    """Open a directory that is no link, for opening files relative to it; None where the system cannot.

    Raises:
        OSError: it is a link, or cannot be opened.
    """
    if os.open not in os.supports_dir_fd:
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return up to `size` bytes of a file from `offset` on; several threads may call this at once."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _at_a_time:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write bytes to a file from `offset` on, and return how many; several threads may call this at once."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    with _at_a_time:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def reserve(descriptor: int, size: int) -> None:
    """Give a file its size, and its space on the disk where the system can reserve it.

    Elsewhere (macOS, Windows) a full disk shows only when it is reached.
    """
    os.ftruncate(descriptor, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Force a file, or the names in a directory, to the disk."""
    is_directory = os.path.isdir(path)
    if is_directory and not SYNCS_DIRECTORIES:
        return
    # Windows syncs only what is open for writing.
    flags = os.O_RDONLY if SYNCS_DIRECTORIES else os.O_RDWR | _BINARY
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peak_resident_bytes() -> int:
    """Return the most memory that this process has used so far."""
    try:
        import resource
    except ImportError:
        import psutil  # type: ignore[import-untyped]

        used = psutil.Process().memory_info()
        return int(getattr(used, "peak_wset", used.rss))
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes in what getrusage counts
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def limit_memory(size: int) -> None:
    """Let this process allocate at most `size` bytes more than it has. Only Linux can limit that.

    A request beyond that fails. A lower limit that the process already has stays.
    """
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as stream:
            pages = int(stream.read().split()[5])  # of data and stacks, which RLIMIT_DATA counts
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + size
    before = resource.getrlimit(resource.RLIMIT_DATA)
    lower = [each for each in (limit, *before) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(lower), before[1]))


def trim_memory() -> None:
    """Have the C library return freed memory to the system.

    Glibc keeps blocks of a few MB, and layer after layer they add up. Other libraries have no such call.
    """
    if os.name == "posix":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
