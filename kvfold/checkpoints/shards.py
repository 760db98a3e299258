"""The safetensors container at the level of bytes: headers are checked, shards are filled in any order.

A file is 8 bytes of header length, a JSON header, then the tensors' bytes without gaps. The header is known
before the first tensor exists. So a checkpoint is written at planned offsets, and no shard is held in memory.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.errors import InvalidInput
from ..core.system_calls import open_bytes, opened_directory, read_at, reserve, write_at
from ..core.untrusted import printable

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Of quantised weights, their scales and their tables.
PACKED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
# Of masks and counters, which are found next to weights and never read.
_OTHER_DTYPES = {
    "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in (DTYPES | PACKED_DTYPES | _OTHER_DTYPES).items()}
_BLOCK = 2**20  # bytes that are read at once for a checksum
_ALIGNMENT = 8  # bytes; the header is padded so that tensor data starts aligned
SHARD_SIZE = 5 * 10**9  # default for the most bytes of a weight file
INDEX = "model.safetensors.index.json"
# Of a file's header, which takes seconds to read at these limits. A published shard describes some thousand
# tensors in less than 1 MB; all 92,000 of DeepSeek-V3 in a single file would take 12 MB.
HEADER_LIMIT = 2**25  # bytes
_POINTER = b"version https://git-lfs"  # how a file that Git LFS did not fetch begins


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is not in memory.

    Attributes:
        dtype: of its elements.
        shape: empty for a scalar.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """The place of a tensor in a file.

    Attributes:
        file: the safetensors file.
        start: offset of its first byte in the file.
        spec: its shape and dtype.
    """

    file: Path
    start: int
    spec: TensorSpec


def read_header(file: Path) -> dict[str, Entry]:
    """Return the place of each tensor of a safetensors file, by name, without reading the tensors.

    Raises:
        InvalidInput: the file is truncated or damaged, as the safetensors library says, or its header is too
            large; or it holds a dtype that torch does not have.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(len(_POINTER))
        if prefix == _POINTER:
            raise InvalidInput(
                f"{file} is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
            )
        length = int.from_bytes(prefix[:8], "little")
        if HEADER_LIMIT < length <= size - 8:
            raise InvalidInput(
                f"{file} has a header of {length} bytes, and at most {HEADER_LIMIT} are read; save the "
                "checkpoint in more files"
            )
        try:
            with safe_open(file, "pt"):  # it checks that tensors fill the file without gaps
                stream.seek(8)
                header = json.loads(stream.read(length))
        except SafetensorError as error:
            raise InvalidInput(
                f"{file} is truncated, damaged or no safetensors file ({error}); download or save it again"
            ) from None
    dtypes, entries = DTYPES | PACKED_DTYPES | _OTHER_DTYPES, {}
    for name, row in header.items():
        if name == "__metadata__":
            continue
        if row["dtype"] not in dtypes:
            raise InvalidInput(
                f"{file} has {printable(name)} as {row['dtype']}, and {', '.join(dtypes)} are read"
            )
        spec = TensorSpec(dtypes[row["dtype"]], tuple(row["shape"]))
        entries[name] = Entry(file, 8 + length + row["data_offsets"][0], spec)
    return entries


def holds_unfolded(file: Path, name: str, dtype: torch.dtype) -> str:
    """Return a sentence about a weight of a dtype that kvfold does not fold."""
    return (
        f"{file.name} holds {printable(name)} as {_NAMES[dtype]!r}; kvfold folds float weights "
        f"({', '.join(DTYPES)}), and others only where config.json has a quantization_config"
    )


def read_flat(entry: Entry, first: int, count: int) -> Tensor:
    """Read consecutive elements of a tensor.

    The first one's index is in the order of memory; they are (count,), on the CPU.

    Raises:
        InvalidInput: the file has become shorter.
    """
    itemsize = entry.spec.dtype.itemsize
    flat = torch.empty(count, dtype=entry.spec.dtype)
    view, done = flat.view(torch.uint8).numpy(), 0
    with entry.file.open("rb", buffering=0) as stream:
        stream.seek(entry.start + first * itemsize)
        while done < len(view):  # one read call returns at most 2 GiB
            got = stream.readinto(view[done:].data)
            if not got:
                raise InvalidInput(f"{entry.file} became shorter while it was read")
            done += got
    return flat


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element of a tensor is NaN or infinite.

    Both show in the least and the greatest element, which are found at the speed of memory. Integers are
    finite.
    """
    if not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def plan_shards(specs: Mapping[str, TensorSpec], shard_size: int) -> list[dict[str, TensorSpec]]:
    """Divide tensors into shards, in the given order.

    A tensor of more than `shard_size` bytes gets a shard of its own.
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.nbytes
    return shards


class ShardWriter:
    """Shards of planned content, which several threads and processes fill in any order.

    All space is allocated at once. The bytes depend on `specs` and the tensors only, so a second writer for
    the same directory continues where a killed process stopped. `close` writes the index; leaving the `with`
    block by an exception writes none.

    Attributes:
        resumed: whether all the shards existed already, with this layout.

    Args:
        directory: the directory of the shards.
        specs: every tensor that will be written, in order.
        shard_size: most bytes of a shard.
        allocate: False if another process has allocated the shards before.

    Raises:
        OSError: the disk is full (space is reserved here) or cannot be written.
    """

    def __init__(
        self, directory: Path, specs: Mapping[str, TensorSpec], shard_size: int, *, allocate: bool = True
    ) -> None:
        shards = plan_shards(specs, shard_size)
        self.resumed = True
        self._directory = directory
        self._specs = specs
        self._files: dict[str, int] = {}
        self._dirty: set[int] = set()
        self._entries: dict[str, Entry] = {}
        try:
            with opened_directory(directory) as within:
                for index, shard in enumerate(shards, 1):
                    name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
                    self._open("model.safetensors" if len(shards) == 1 else name, within, shard, allocate)
        except BaseException:
            self.release()  # an open file would keep its space on a full disk even once it is removed
            raise

    def _open(self, name: str, within: int | None, shard: dict[str, TensorSpec], allocate: bool) -> None:
        file = self._directory / name
        # Widest dtype first, so that every tensor starts at a multiple of its item size.
        ordered = sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize)
        rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor, spec in ordered:
            rows[tensor] = {
                "dtype": _NAMES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": (end, end + spec.nbytes),
            }
            end += spec.nbytes
        header = json.dumps(rows, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        start = 8 + len(header)
        for tensor, spec in ordered:
            begin, _ = rows[tensor]["data_offsets"]
            self._entries[tensor] = Entry(file, start + begin, spec)
        prefix = struct.pack("<Q", len(header)) + header
        place = file if within is None else name
        descriptor = self._files[str(file)] = open_bytes(place, create=allocate, within=within)
        if os.fstat(descriptor).st_nlink > 1:
            raise InvalidInput(f"{file} has a second name, a hard link, which would change too; remove one")
        self.resumed &= (
            os.fstat(descriptor).st_size == start + end and read_at(descriptor, start, 0) == prefix
        )
        if allocate:
            write_at(descriptor, prefix, 0)
            reserve(descriptor, start + end)

    def write(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Write consecutive elements of a tensor, cast to its planned dtype.

        They have any shape and are on any device; `first` is the index of the first in the whole tensor.

        Raises:
            InvalidInput: a value is not finite, or too large for the dtype.
        """
        entry = self._entries[name]
        flat = tensor.detach().to("cpu", entry.spec.dtype).contiguous().flatten()
        if not is_finite(flat):
            dtype = str(entry.spec.dtype).removeprefix("torch.")
            raise InvalidInput(
                f"{name} has values that {dtype} does not hold; write another --dtype, e.g. bfloat16"
            )
        assert first + flat.numel() <= math.prod(entry.spec.shape), f"{name} is larger than planned"
        data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        offset, file = entry.start + first * entry.spec.dtype.itemsize, self._files[str(entry.file)]
        while data:
            done = write_at(file, data, offset)
            data, offset = data[done:], offset + done
        self._dirty.add(file)  # last: another thread may be in `sync`

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Return the CRC-32 of the bytes that tensors have in their files, by name, without unknown names."""
        return {name: self._checksum(self._entries[name]) for name in names if name in self._entries}

    def _checksum(self, entry: Entry) -> int:
        file, found = self._files[str(entry.file)], 0
        for first, size in pieces(TensorSpec(torch.uint8, (entry.spec.nbytes,)), _BLOCK):
            found = zlib.crc32(read_at(file, size, entry.start + first), found)
        return found

    def sync(self) -> None:
        """Force everything written so far to the disk."""
        while self._dirty:
            os.fsync(self._dirty.pop())

    def close(self) -> None:
        """Force everything to the disk, write the index if there are several shards, and close the files."""
        self.sync()
        if len(self._files) > 1:
            metadata = {
                "total_parameters": sum(math.prod(spec.shape) for spec in self._specs.values()),
                "total_size": sum(spec.nbytes for spec in self._specs.values()),
            }
            weight_map = {name: self._entries[name].file.name for name in self._specs}
            index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
            (self._directory / INDEX).write_text(index + "\n", encoding="utf-8")
        self.release()

    def release(self) -> None:
        """Close the files as they are, without an index."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.release()


def pieces(spec: TensorSpec, elements: int, whole: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the consecutive pieces of a tensor, as (first element, number of elements).

    A piece has about `elements` elements, and always a multiple of `whole`, such as the length of a row.
    """
    total = math.prod(spec.shape)
    step = max(elements // whole, 1) * whole
    for first in range(0, total, step):
        yield first, min(step, total - first)
