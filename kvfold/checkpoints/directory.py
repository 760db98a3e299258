"""Model directories: a lazy mapping from names to tensors, and the files that travel with the weights."""

import difflib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.console import is_first, notice
from ..core.errors import InvalidInput
from ..core.files import rename_whole
from ..core.hub import check_name
from ..core.untrusted import printable, read_json, shorten
from ..core.work import discard_finished
from .other_forms import without_config
from .shards import (
    DTYPES,
    INDEX,
    PACKED_DTYPES,
    Entry,
    TensorSpec,
    holds_unfolded,
    is_finite,
    pieces,
    read_flat,
    read_header,
)
from .side_files import matching

PIECE = 1 << 20  # elements in which a tensor is copied: a piece fits in the processor's caches
TOKENIZER_FILES = ("*token*.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
SIDE_FILES = (
    *TOKENIZER_FILES, "chat_template*", "*.jinja", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
# Side files in which transformers looks for names of code, and the fields that hold these names.
SIDE_CONFIGS = (
    "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "generation_config.json",
)  # fmt: skip
NAMES_CODE = ("auto_map", "custom_pipelines")
# transformers makes lists this long.
_LISTED = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_num_experts",
)  # fmt: skip
# Fields by which config.json chooses an implementation. Every other value makes transformers look for a
# kernel, which it may download and run.
_CHOOSES = ("attn_implementation", "experts_implementation")
_BUILT_IN = {None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"}
# Fields by which config.json has transformers read other files than itself and the weights.
_ELSEWHERE = ("configuration_files", "transformers_weights")
_LIST_LIMIT = 10_000
_CONFIG_BYTES = 2**22  # a file that is read often; 18,000 modules take 2 MB
# Masks, tables and counters that classes of older releases saved, and that today's compute or do without.
_BUFFERS = re.compile(
    r"(^|\.)(\w*inv_freq|masked_bias|(attn|attention)\.bias|causal_mask|rotary_emb\.(cos|sin)_cached"
    r"|position_ids|version)$"
)
_WHOLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Checkpoint(Mapping[str, Tensor]):
    """A Hugging Face model directory; a tensor is read when it is asked for, and not kept.

    It has the tensors that a class can read. Buffers of older releases' classes and what is no weight by its
    dtype are left out, whatever they hold. A weight that a class does read is then missing: see `absence`.

    Args:
        directory: the directory.
        packed: whether its tensors may have dtypes of quantised weights, as for `QuantisedCheckpoint`.

    Attributes:
        directory: the directory.
        config: content of config.json.
        opened: its `identity` when it was opened.
        origin: the checkpoint whose files are read, as they are stored: itself, unless it is a view.
        left_out: the tensors of its files that it does not have.

    Raises:
        InvalidInput: there is no config.json, or no safetensors (for a pickle the error names the command
            that converts it); a shard is missing or truncated; the index disagrees with its shards.
    """

    def __init__(self, directory: Path, *, packed: bool = False) -> None:
        self.directory = directory
        self.config = read_config(directory)
        check_safetensors(directory)
        found = _entries(directory, packed)
        self._entries = {name: entry for name, entry in found.items() if _is_read(name, entry, packed)}
        self.left_out = {name: entry for name, entry in found.items() if name not in self._entries}
        self.opened, self.origin = self.identity(), self

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        return self._finite(name, read_flat(entry, 0, math.prod(entry.spec.shape))).reshape(entry.spec.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def absence(self, name: str, owner: str) -> InvalidInput:
        """Return the error for a tensor that a class reads and the checkpoint does not have.

        `owner` has the tensor, such as `a LlamaForCausalLM`.
        """
        module = name.rpartition(".")[0]
        for other, entry in self.origin.left_out.items():
            if other.rpartition(".")[0] == module and not _BUFFERS.search(other):
                return InvalidInput(holds_unfolded(entry.file, other, entry.spec.dtype))
        return InvalidInput(
            f"{self.directory} has no {printable(name)}, which {owner} has; {found_instead(name, self)}"
        )

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and dtype of a tensor, without reading it."""
        return self._entries[name].spec

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a dtype."""
        return self[name].to(dtype)

    def stream(self, name: str, by_rows: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in flat pieces, so that memory does not depend on its size.

        Each comes with the index of its first element; with `by_rows` it has whole rows of the last
        dimension.
        """
        entry = self._entries[name]
        for first, count in pieces(entry.spec, PIECE, entry.spec.shape[-1] if by_rows else 1):
            yield first, self._finite(name, read_flat(entry, first, count))

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same shape and numbers.

        Reading ends at the first piece that differs.
        """
        if self.spec(one).shape != self.spec(other).shape:
            return False
        pieces = zip(self.stream(one), self.stream(other), strict=True)
        return all(torch.equal(a.to(torch.float64), b.to(torch.float64)) for (_, a), (_, b) in pieces)

    @property
    def files(self) -> list[Path]:
        """Return the weight files, sorted."""
        return sorted({entry.file for entry in self._entries.values()})

    @property
    def is_in_place(self) -> bool:
        """Return whether the weight files lie in the directory."""
        return all(file.parent == self.directory for file in self.files)

    def file_of(self, name: str) -> Path:
        """Return the weight file that holds a tensor."""
        return self._entries[name].file

    def identity(self) -> list[tuple[str, int, int]]:
        """Return what changes when the checkpoint does.

        It is the name, the bytes and the modification time in ns of each weight file and of config.json.
        """
        files = sorted({*self.files, self.directory / "config.json"})
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if not is_finite(tensor):
            raise InvalidInput(
                f"{name} of {self.directory} holds NaN or infinite values; the checkpoint is damaged"
            )
        return tensor


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of a model directory's config.json.

    Raises:
        InvalidInput: there is none, or it is no object, names other files or code, or has too large a count.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise InvalidInput(without_config(directory))
    config: dict[str, Any] = read_json(path, _CONFIG_BYTES)
    if names := next((field for field in _ELSEWHERE if config.get(field) is not None), ""):
        raise InvalidInput(f"{path} has {names}, which names other files than this one; remove the field")
    for field, value in fields_of(config):
        if field in _LISTED and isinstance(value, int | float) and not 0 <= value <= _LIST_LIMIT:
            raise InvalidInput(
                f"{path} has {field} {shorten(value)}, where a number from 0 to {_LIST_LIMIT} is needed"
            )
        name = field.removeprefix("_").removesuffix("_internal")
        if name in _CHOOSES and not (isinstance(value, str | None) and value in _BUILT_IN):
            raise InvalidInput(
                f"{path} has {field} {shorten(value)}, for which transformers may download and run a kernel; "
                "remove the field"
            )
    return config


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all fields of a JSON value with their values, at any depth."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from value.items()
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def found_instead(name: str, stored: Collection[str]) -> str:
    """Return what a checkpoint has in the place of a tensor that it lacks, and what would be right.

    Example:
        >>> found_instead("norm.weight", ["_orig_mod.norm.weight"])
        'it has _orig_mod.norm.weight instead: save the model without the wrapper that added `_orig_mod`'
    """
    for other in stored:
        added = other.split(".")
        for part in name.split("."):
            if part in added:
                added.remove(part)
        if other.count(".") - name.count(".") == len(added) and not any(part.isdigit() for part in added):
            return (
                f"it has {printable(other)} instead: save the model without the wrapper that added "
                f"`{printable('.'.join(added))}`"
            )
    near = difflib.get_close_matches(name, stored, n=1)
    nearest = f", e.g. {printable(near[0])}" if near else ""
    return (
        f"it has {len(stored)} others{nearest}: correct config.json if they are of another model, or save "
        "the whole model again"
    )


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers reads, sorted: one, or those that the index names.

    Raises:
        InvalidInput: there is neither, the index is damaged, or a file is missing or not a regular one.
    """
    whole = directory / _WHOLE
    if whole.is_file() or (whole.is_symlink() and not whole.exists()):  # a broken link is an error of its own
        # As in transformers: an index, or files such as another framework's, next to it are not read.
        return [whole]
    if whole.exists():
        raise InvalidInput(f"{whole} is not a regular file; put the weights there, or remove it")
    if not (directory / INDEX).is_file():
        files = sorted(directory.glob("*.safetensors"))
        raise InvalidInput(
            f"{directory} has {len(files)} safetensors files but neither {_WHOLE} nor {INDEX} that says what "
            "is in them; download or save it again"
        )
    return [directory / name for name in sorted(set(_weight_map(directory).values()))]


def _entries(directory: Path, packed: bool) -> dict[str, Entry]:
    files = weight_files(directory)
    if files == [directory / _WHOLE]:
        return read_header(files[0])
    weight_map = _weight_map(directory)
    named: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        named.setdefault(shard, set()).add(name)
    entries: dict[str, Entry] = {}
    for file in files:
        found = read_header(file)
        wrong = sorted({name for name in named[file.name] if not _BUFFERS.search(name)} - found.keys())
        if wrong:  # before the next shard is read, so that no number of them fills the memory
            more = "" if len(wrong) == 1 else f" and {len(wrong) - 1} more"
            raise InvalidInput(
                f"{directory / INDEX} disagrees with its shards about {wrong[0]}{more}, which "
                f"{file.name} lacks, and are of different saves; put the files of one into a new directory"
            )
        there = {name for name, entry in found.items() if _is_read(name, entry, packed)}
        unlisted = sorted(there - named[file.name])
        if unlisted:
            notice(
                f"{directory / INDEX} does not list {len(unlisted)} tensors of {file.name}, e.g. "
                f"{printable(unlisted[0])}; they are left out"
            )
        entries |= {name: found[name] for name in named[file.name] & found.keys()}
    return {name: entries[name] for name in weight_map if name in entries}


def _is_read(name: str, entry: Entry, packed: bool) -> bool:
    """Return whether a tensor can be a weight, or with `packed` a part of a quantised one."""
    dtypes = DTYPES | PACKED_DTYPES if packed else DTYPES
    return entry.spec.dtype in dtypes.values() and not _BUFFERS.search(name)


def _weight_map(directory: Path) -> dict[str, str]:
    """Return the names of the shards by tensor, from the index; all shards exist."""
    index = directory / INDEX
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidInput(f"{index} is damaged: it has no weight_map; download or save it again")
    for tensor, name in weight_map.items():
        is_name = isinstance(name, str) and name not in {"", ".", ".."} and not set(name) & set("/\\\0")
        if not is_name:
            raise InvalidInput(
                f"{index} has the shard {shorten(name)} for {shorten(tensor)}, where the name of a file next "
                "to it is needed; download or save it again"
            )
    if not isinstance(content.get("metadata"), dict):
        raise InvalidInput(f"{index} has no object in metadata, which transformers needs; save it again")
    for name in sorted(set(weight_map.values())):
        if not (directory / name).is_file():
            raise InvalidInput(
                f"{directory} lacks the shard {name} that its index names; download or save it again"
            )
    return weight_map


def check_safetensors(directory: Path) -> None:
    """Check that a directory has safetensors, and no adapter that transformers would add to them.

    Raises:
        InvalidInput: as of `read_config`; it has no safetensors (for a pickle the error names the command
            that converts it), or an adapter.
    """
    read_config(directory)
    if (directory / "adapter_config.json").exists():
        raise InvalidInput(
            f"{directory} has an adapter (adapter_config.json), which transformers adds to the weights; "
            "merge it into them, or remove the file"
        )
    if any(directory.glob("*.safetensors")):
        return
    if any(path for pattern in _PICKLES for path in directory.glob(pattern)):
        raise InvalidInput(
            f"{directory} holds pickled weights, which can run code when loaded; convert them first with: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}', dtype='auto').save_pretrained('{directory}-safetensors')\""
        )
    raise InvalidInput(f"{directory} has no safetensors weights (model.safetensors, or shards with {INDEX})")


def check_output(out: Path, source: Path | None = None) -> None:
    """Refuse an output that exists, cannot be made, or is inside the source.

    Raises:
        InvalidInput: the output cannot be written there.
    """
    check_name(out.absolute())
    if is_first():
        discard_finished(out)
    if out.exists() or out.is_symlink():
        raise InvalidInput(f"{out} exists and nothing is overwritten; name another with --out, or remove it")
    if source is not None and out.resolve().is_relative_to(source.resolve()):
        raise InvalidInput(
            f"{out} is inside the source {source}, which is never written; name another with --out"
        )
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InvalidInput(
            f"cannot write {out}: {parent} is {'not writable' if parent.is_dir() else 'not a directory'}"
        )


def finish(partial: Path, out: Path) -> None:
    """Force a finished model directory to the disk and give it its final name.

    `out` is on the same file system.

    Raises:
        InvalidInput: `out` exists by now.
        OSError: the disk is full or cannot be written.
    """
    check_output(out)
    rename_whole(partial, out)


def copy_side_files(source: Path, out: Path) -> None:
    """Copy the files that travel with the weights: tokenizer, chat template, generation config, licence.

    Weights, config.json, kvfold.json, the model card and code are not copied, since each output has its own.
    Fields that name code are left out of the copies.

    Raises:
        InvalidInput: as of `side_files`, or a configuration among them is not JSON.
    """
    for path in side_files(source):
        shutil.copyfile(path, out / path.name)
        if path.name in SIDE_CONFIGS:  # one that names no code keeps its bytes
            content = read_json(path, name=path.name, top=None)
            kept = without_code(content)
            if kept != content:
                text = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
                (out / path.name).write_text(text, encoding="utf-8")


def side_files(source: Path) -> list[Path]:
    """Return the files that travel with the weights, sorted.

    Raises:
        InvalidInput: one of them is a link to somewhere else, is not a regular file, or is too large.
    """
    return matching(source, SIDE_FILES)


def check_side_files(source: Path) -> None:
    """Refuse a model directory whose other files than the weights cannot be copied, before any work.

    Raises:
        InvalidInput: as of `copy_side_files`.
    """
    for path in side_files(source):
        if path.name in SIDE_CONFIGS:
            read_json(path, name=str(path), top=None)


def without_code(value: Any) -> Any:
    """Return a JSON value without the fields that name code, at any depth."""
    if isinstance(value, dict):
        return {key: without_code(inner) for key, inner in value.items() if key not in NAMES_CODE}
    return [without_code(inner) for inner in value] if isinstance(value, list) else value
