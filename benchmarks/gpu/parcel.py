"""A small source as files that may come home: a tar archive in parts of less than 16 MiB."""

import tarfile
import tempfile
from pathlib import Path

from kvfold.core.errors import InvalidInput

PART = 15 * 2**20  # bytes
NAME = "twin.tar"  # whatever its name was, the source is called twin at home


def pack(directory: Path, out: Path) -> list[Path]:
    """Write a checkpoint into `out` as `twin.tar.0`, `twin.tar.1` and so on; return the files."""
    for earlier in out.glob(f"{NAME}.*"):
        earlier.unlink()
    with tempfile.TemporaryFile() as stream:
        with tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(directory, arcname="twin")
        stream.seek(0)
        files = []
        while part := stream.read(PART):
            files.append(out / f"{NAME}.{len(files)}")
            files[-1].write_bytes(part)
    return files


def unpack(out: Path, work: Path) -> Path:
    """Write the checkpoint of `pack` into `work`; return its directory.

    Raises:
        InvalidInput: there is no archive, or the directory exists.
    """
    files = sorted(out.glob(f"{NAME}.*"), key=lambda file: int(file.suffix[1:]))
    if not files:
        raise InvalidInput(f"{out} has no {NAME}.0; name the directory that the part train wrote with --out")
    if (work / "twin").exists():
        raise InvalidInput(f"{work / 'twin'} exists; remove it, or name another --work")
    with tempfile.TemporaryFile() as stream:
        for file in files:
            stream.write(file.read_bytes())
        stream.seek(0)
        with tarfile.open(fileobj=stream) as archive:
            archive.extractall(work, filter="data")
    return work / "twin"
