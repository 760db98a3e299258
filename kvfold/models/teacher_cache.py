"""A teacher's last hidden states on disk: it runs once, and any number of students are compared with it.

A directory holds manifest.json (the teacher and the precision), head.safetensors (the output embedding) and
hidden-*.safetensors: hidden states (N, S, D) of N windows, and a key of each window's tokens and positions by
which it is found. So one directory serves every text, and `kvfold eval` and `kvfold distill` share it.
Several processes can extend it at the same time, and a file has its name only when it is whole.

Hidden states give the same logits as the teacher, and take less space than logits by as much as the
vocabulary is wider than they are.

Shapes: B windows of a batch, N windows of a file, S tokens of a window, D hidden size, V vocabulary, C any
number of tokens.
"""

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from ..checkpoints.quantised.schemes import MODELOPT_FILE
from ..checkpoints.shards import is_finite
from ..core.disk import DiskError, disk_sentence, naming
from ..core.errors import InvalidInput
from ..core.files import load_whole, locked, replace_text, save_whole
from ..core.units import show_bytes
from ..core.untrusted import printable, read_json, shorten
from .head import HeadForm, head_form

T = TypeVar("T")
FILE_BYTES = 2**28  # of hidden states in one file
_SCHEMA = 1
_MANIFEST = "manifest.json"
_HEAD = "head.safetensors"
_LOCK = "lock"
_KEY = 16  # bytes
_DECISIVE = (".safetensors", ".py")  # files on which hidden states depend, in addition to the next two
_CONFIGS = ("config.json", MODELOPT_FILE)


def identify(hashes: Mapping[str, str], computed_in: str, dtype: str | None = None) -> dict[str, Any]:
    """Return the part of a manifest that decides whether hidden states can be used.

    Args:
        hashes: SHA-256 of the teacher's files, by name.
        computed_in: dtype of the computation, as torch names it.
        dtype: in which the states are stored; None: in which they are computed.
    """
    files = {name: hashes[name] for name in hashes if name.endswith(_DECISIVE) or name in _CONFIGS}
    return {"schema": _SCHEMA, "teacher": files, "dtype": dtype or computed_in, "computed_in": computed_in}


def window_keys(ids_BS: Tensor, positions_BS: Tensor | None = None) -> list[bytes]:
    """Return the key of each window: a hash of its tokens and positions.

    Args:
        ids_BS: token ids, int64.
        positions_BS: position ids, int64; None: 0 to S - 1.
    """
    if positions_BS is None:
        positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    both_B2S = torch.stack([ids_BS, positions_BS], 1).cpu().contiguous().numpy()
    return [hashlib.blake2b(window_2S.tobytes(), digest_size=_KEY).digest() for window_2S in both_B2S]


def parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield a sequence in pieces of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def check_place(directory: Path, option: str) -> None:
    """Refuse a directory that holds something else than a cache; what a killed run has left is allowed.

    Raises:
        InvalidInput: it holds something else.
    """
    if (directory / _MANIFEST).is_file() or not directory.exists():
        return
    if directory.is_dir():
        names = {path.name for path in directory.iterdir()}
        if names <= {_LOCK, f"{_MANIFEST}.partial"}:
            return
    raise InvalidInput(f"{option} {directory} is no cache of a teacher; name another directory")


class TeacherCache:
    """A directory of hidden states, which need not exist yet.

    `option` is the name of the setting that asks for it; `identity` is from `identify`, with whatever else
    must agree, such as the device.

    Raises:
        InvalidInput: the directory holds something else, or states of another teacher or precision.
    """

    def __init__(self, directory: Path, option: str, identity: Mapping[str, Any]) -> None:
        self.directory = directory
        self._option, self._name = option, f"{option} {directory}"
        self._identity = dict(identity)
        self._files: dict[Path, Any] = {}
        self._checksums: dict[Path, list[int] | None] = {}  # of each window; none in files before 2026-11-28
        self._places: dict[bytes, tuple[Path, int]] = {}
        self._head: dict[str, Tensor] = {}
        self._form = HeadForm()
        self.refresh()

    def refresh(self) -> None:
        """Read the directory again, to which other processes may have added.

        Raises:
            InvalidInput: it is damaged, or holds something else, or states of another teacher or precision.
        """
        manifest = self._read_manifest()
        if manifest is None or not (self.directory / _HEAD).is_file():
            return
        self._form = HeadForm(manifest["scale"], manifest["soft_cap"])
        for path in sorted(self.directory.glob("hidden-*.safetensors")):
            if path not in self._files:
                self._open(path)

    def _open(self, path: Path) -> None:
        """Note the windows of a file; their hidden states are read when they are used."""
        try:
            file = safe_open(path, framework="pt")
            states = file.get_slice("hidden")  # type: ignore[no-untyped-call]
            keys: Tensor = file.get_tensor("keys")  # type: ignore[no-untyped-call]
            known = "checksums" in file.keys()  # type: ignore[no-untyped-call]  # noqa: SIM118
            self._checksums[path] = file.get_tensor("checksums").tolist() if known else None  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            reason = printable(" ".join(str(error).split()))[:200]
            raise InvalidInput(f"{self._name}: {path.name} is damaged ({reason}); remove it") from None
        shape = states.get_shape()
        if len(shape) != 3 or keys.shape != (shape[0], _KEY) or keys.dtype != torch.uint8:
            raise InvalidInput(
                f"{self._name}: {path.name} is damaged (its tensors have not the shapes of hidden states and "
                "keys); remove it"
            )
        self._files[path] = states
        for row, key in enumerate(keys):
            self._places.setdefault(bytes(key.tolist()), (path, row))

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys of windows that are not stored, each once, in order."""
        return [key for key in dict.fromkeys(keys) if key not in self._places]

    def begin(self, model: Any, device: str) -> None:
        """Make the directory ready for hidden states of a model; nothing happens where it is.

        Raises:
            InvalidInput: the directory cannot be written, or another run has used it for something else.
        """
        form = head_form(model)
        manifest = {"device": device, **self._identity, "scale": form.scale, "soft_cap": form.soft_cap}
        with self._changing():
            if self._read_manifest() is None:
                replace_text(self.directory / _MANIFEST, json.dumps(manifest, indent=2) + "\n")
            if not (self.directory / _HEAD).is_file():
                save_whole(_tensors_of(model.get_output_embeddings()), self.directory / _HEAD)
        self.refresh()

    def write(self, keys: Sequence[bytes], hidden_NSD: Tensor) -> None:
        """Store the hidden states of some windows in a file of their own, which `refresh` then finds.

        Raises:
            InvalidInput: the directory cannot be written.
        """
        name = hashlib.sha256(b"".join(keys)).hexdigest()[:16]
        keys_NK = torch.tensor([list(key) for key in keys], dtype=torch.uint8)
        hidden_NSD = hidden_NSD.cpu().contiguous()
        tensors = {
            "hidden": hidden_NSD,
            "keys": keys_NK,
            "checksums": torch.tensor([_checksum(hidden_SD) for hidden_SD in hidden_NSD]),
        }
        with self._changing():
            save_whole(tensors, self.directory / f"hidden-{name}.safetensors")

    def check_space(self, needed: int, remedy: str) -> None:
        """Compare the space that new states take with the free space of the disk.

        Raises:
            InvalidInput: the disk is too small.
        """
        place = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise InvalidInput(
                f"{self._name}: the hidden states take {show_bytes(needed)} and {show_bytes(free)} are free; "
                f"name a directory on a larger disk, or {remedy}"
            )

    def hidden(self, keys: Sequence[bytes]) -> Tensor:
        """Return the hidden states (B, S, D) of windows of one length, as stored, on the CPU.

        Raises:
            InvalidInput: one is not stored.
        """
        self.check_holds(keys)
        states = []
        for key in keys:
            path, row = self._places[key]
            state_SD, known = self._files[path][row], self._checksums[path]
            if known is not None and known[row : row + 1] != [_checksum(state_SD)]:
                raise InvalidInput(
                    f"{self._name}: {path.name} has changed since it was written; remove that file"
                )
            states.append(state_SD)
        if not all(state.shape == states[0].shape and is_finite(state) for state in states):
            raise InvalidInput(
                f"{self._name} holds hidden states that are not finite or differ in shape; name another "
                "directory"
            )
        return torch.stack(states)

    def check_holds(self, keys: Iterable[bytes]) -> None:
        """Check that windows are stored.

        Raises:
            InvalidInput: one is not.
        """
        if self.missing(keys):
            raise InvalidInput(f"{self._name} lacks a window of this run; name another directory")

    def head(self, device: torch.device) -> tuple[Tensor, Tensor | None, HeadForm]:
        """Return the head's weight (V, D) and bias (V,) on a device, and the form of the logits."""
        if not self._head:
            tensors = load_whole(self.directory / _HEAD)
            if tensors is None or "weight" not in tensors or not all(map(is_finite, tensors.values())):
                raise InvalidInput(f"{self._name}: {_HEAD} is damaged; name another directory")
            self._head = {name: tensor.to(device) for name, tensor in tensors.items()}
        return self._head["weight"], self._head.get("bias"), self._form

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return the teacher's logits (C, V) of hidden states, on their device and in the teacher's dtype."""
        weight_VD, bias_V, form = self.head(hidden_CD.device)
        return form.logits(linear(hidden_CD.to(weight_VD.dtype), weight_VD, bias_V))

    def _read_manifest(self) -> dict[str, Any] | None:
        """Return the manifest, if there is one, after it was compared with what is asked for."""
        file = self.directory / _MANIFEST
        if not file.is_file():
            check_place(self.directory, self._option)
            return None
        try:
            manifest: dict[str, Any] = read_json(file)
        except InvalidInput:
            raise InvalidInput(f"{self._name} is no cache of a teacher; name another directory") from None
        for key, wanted in self._identity.items():
            found = manifest.get(key)
            if found != wanted:
                values = "" if key == "teacher" else f" ({shorten(found)}, not {wanted!r})"
                raise InvalidInput(
                    f"{self._name} was made with another {key}{values}; name another directory"
                )
        if not {"scale", "soft_cap"} <= manifest.keys():
            raise InvalidInput(f"{self._name} has a damaged {_MANIFEST}; name another directory")
        return manifest

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let one process at a time change the directory; whatever is unfinished was left by a killed one."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with locked(self.directory / _LOCK, None):
                for pattern in (_MANIFEST, _HEAD, "hidden-*.safetensors"):
                    for unfinished in self.directory.glob(f"{pattern}.partial"):
                        unfinished.unlink()
                with naming(self.directory):
                    yield
        except DiskError as error:
            raise InvalidInput(f"{self._name}: {disk_sentence(error)}") from None
        except (OSError, SafetensorError) as error:
            raise InvalidInput(f"{self._name} cannot be written: {error}") from None


def _checksum(state_SD: Tensor) -> int:
    return zlib.crc32(state_SD.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _tensors_of(head: Any) -> dict[str, Tensor]:
    """Return a head's tensors on the CPU; accelerate keeps those that it has put on the disk elsewhere."""
    weights = getattr(getattr(head, "_hf_hook", None), "weights_map", None)
    found = {
        name: value if weights is None or not value.is_meta else weights[name]
        for name, value in head.named_parameters()
    }
    return {name: value.detach().cpu().contiguous() for name, value in found.items()}
