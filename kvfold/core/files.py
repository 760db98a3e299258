"""Files and directories that appear whole or not at all, and locks that keep two runs apart.

There are two kinds of place. Next to a file of the user, a temporary name could be the user's too: there
`whole_file` writes into a new private directory. Inside a working directory that kvfold has claimed, every
name is kvfold's: there `replace_text` and `save_whole` write `<name>.partial`, so that what a killed run
leaves is replaced by the next one.

No heavy import here: `--help` goes through this module.
"""

import itertools
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from .disk import naming
from .errors import InvalidInput
from .system_calls import MOVES_OPEN_FILES, sync_path

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from torch import Tensor

PREFIX = ".kvfold-"  # of the private directories; only a kill leaves one behind
_held: dict[Path, "BaseFileLock"] = {}  # locks of this process by file
_CHECKSUM = "kvfold_crc32"  # key of the metadata of safetensors files
_ATTEMPTS = 5  # to get a lock whose file another process removes at the same time


@contextmanager
def whole_file(file: Path, *, replace: bool = False) -> Iterator[Path]:
    """Write a file that appears under its name when the block ends without an error.

    The block gets a path in a new private directory next to `file`, so no existing file is emptied, followed
    or removed. The content is forced to the disk before it gets its name. With `replace` a file of that name
    may be there; the new one gets its mode. A link is replaced, not followed.

    Raises:
        InvalidInput: `file` exists, at the start or at the end, and `replace` is not set.
        OSError: the directory cannot be written.
    """
    _check_free(file, replace)
    with naming(file), private_directory(file) as place:
        temporary = place / file.name
        yield temporary
        if replace and file.is_file() and not file.is_symlink():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        sync_path(temporary)
        _check_free(file, replace)
        temporary.replace(file)


def check_makeable(path: Path) -> None:
    """Check before long work that a directory or a file can be made, by making an empty directory next to it.

    File systems such as /proc refuse what their permissions allow. Nothing gets the name of `path`, and the
    directory, whose name is new, is removed at once. Where the parent does not exist, the nearest directory
    above it that does is checked.

    Raises:
        InvalidInput: the system refuses it.
    """
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        Path(mkdtemp(dir=parent, prefix=PREFIX)).rmdir()
    except OSError as error:
        raise InvalidInput(
            f"cannot write {path}: nothing can be made in {parent} ({error.strerror}); name another place"
        ) from None


def write_whole(file: Path, content: str, *, replace: bool = False) -> None:
    """Write a text file as `whole_file` does, in UTF-8.

    Raises:
        InvalidInput: `file` exists and `replace` is not set.
        OSError: the directory cannot be written.
    """
    with whole_file(file, replace=replace) as temporary:
        temporary.write_text(content, encoding="utf-8")


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file of ASCII characters, in a directory that does not have its final name yet."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def rename_whole(partial: Path, out: Path) -> None:
    """Force a file, or a directory and all that is in it, to the disk and give it its final name.

    Links are not followed. `out` is on the same file system.

    Raises:
        InvalidInput: `out` exists.
        OSError: a file cannot be forced to the disk, or renamed.
    """
    for path in [*partial.rglob("*"), partial]:
        if not path.is_symlink():
            sync_path(path)
    _check_free(out, replace=False)
    partial.rename(out)
    with suppress(OSError):  # the output is whole under its name, which only a power failure could still undo
        sync_path(out.parent)


def replace_text(file: Path, content: str) -> None:
    """Write a text file whole or not at all inside a directory that belongs to kvfold.

    A file of that name is replaced; other hard links to it keep their content.

    Raises:
        OSError: the directory cannot be written.
    """
    unfinished = _unfinished(file)
    with naming(file), unfinished.open("x", encoding="utf-8") as stream:
        stream.write(content)
    unfinished.replace(file)


def save_whole(tensors: Mapping[str, "Tensor"], file: Path) -> None:
    """Write a safetensors file whole or not at all inside a directory that belongs to kvfold.

    A file of that name is replaced. It holds a checksum, which `load_whole` checks.

    Raises:
        OSError: the directory cannot be written, or the disk is full.
    """
    from safetensors.torch import save_file

    unfinished = _unfinished(file)
    with naming(file):
        save_file(dict(tensors), unfinished, {_CHECKSUM: str(_checksum(file, tensors))})
    unfinished.replace(file)


def load_whole(file: Path) -> dict[str, "Tensor"] | None:
    """Return the tensors of a file as `save_whole` wrote them.

    Returns:
        The tensors by name, on the CPU; None if there is no such file, or it has changed since it was written
        or was renamed. Files of earlier versions without a checksum are taken as they are.
    """
    from safetensors import SafetensorError, safe_open

    if file.is_symlink() or not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as stored:
            told = (stored.metadata() or {}).get(_CHECKSUM)
            tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError):
        return None
    return tensors if told in {None, str(_checksum(file, tensors))} else None


def _checksum(file: Path, tensors: Mapping[str, "Tensor"]) -> int:
    import torch

    found = zlib.crc32(file.name.encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


@contextmanager
def locked(file: Path, busy: str | None) -> Iterator[None]:
    """Hold a lock for the duration of a block; the system releases it if the process dies.

    The lock file stays, because a working directory is also recognised by it. Whoever removes it does so
    inside the block. `busy` is the error if another process holds the lock; None: wait until it is released.

    Raises:
        InvalidInput: another process holds the lock and `busy` is given, or `file` exists and is not an empty
            file.
        OSError: `file` cannot be created.
    """
    if file.is_symlink() or (file.exists() and not (file.is_file() and file.stat().st_size == 0)):
        raise InvalidInput(f"{file} exists and is not a lock of kvfold; move it")
    lock = _held[file] = _acquire(file, busy)
    try:
        yield
    finally:
        _held.pop(file, None)
        stays = file.exists()
        lock.release()
        if stays:  # some versions of filelock remove the file on release, others do not
            with suppress(OSError):
                file.touch()


@contextmanager
def private_directory(path: Path) -> Iterator[Path]:
    """Make a directory next to a path that only this user can enter, and remove it at the end.

    Raises:
        OSError: the directory cannot be made.
    """
    try:
        made = TemporaryDirectory(dir=path.absolute().parent, prefix=PREFIX, ignore_cleanup_errors=True)
    except OSError as error:  # it names the private directory, which the user did not choose
        raise OSError(error.errno, error.strerror, str(path)) from None
    with made as name:
        yield Path(name)


def release_held(directory: Path) -> None:
    """Release this process's locks in a directory that is about to move or go, where open files cannot."""
    if MOVES_OPEN_FILES:
        return
    for file in [file for file in _held if directory in file.parents]:
        _held.pop(file).release()


def _acquire(file: Path, busy: str | None) -> "BaseFileLock":
    from filelock import FileLock, Timeout

    for _ in itertools.count() if busy is None else range(_ATTEMPTS):
        # Some versions of filelock report a directory without files, such as /proc, as a lock that is taken;
        # this gives the system's own error.
        flags = os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
        os.close(os.open(file, flags, 0o644))
        lock = FileLock(file, timeout=-1 if busy is None else 0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise InvalidInput(str(busy)) from None
        if file.exists():
            return lock
        lock.release()  # the process that held it has removed the file: another could lock a new one
    raise InvalidInput(str(busy))


def _check_free(path: Path, replace: bool) -> None:
    if not replace and (path.exists() or path.is_symlink()):
        raise InvalidInput(f"{path} exists and nothing is overwritten; name another, or remove it")


def _unfinished(file: Path) -> Path:
    """Return the temporary name of a file in a directory of kvfold, which nothing has yet."""
    unfinished = file.with_name(f"{file.name}.partial")
    unfinished.unlink(missing_ok=True)  # a killed run left it; it might be a link
    return unfinished


def link_or_copy(source: str | Path, place: str | Path, *, symbolic: bool = False) -> None:
    """Link a file, or copy it where links are impossible; for `shutil.copytree`.

    A symbolic link may cross file systems.
    """
    try:
        (os.symlink if symbolic else os.link)(source, place)
    except OSError:  # a file system, or an account, that may not make links
        shutil.copy2(source, place)
