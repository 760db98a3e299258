"""Statistics of a source model on tokens, from which the cost of a fold is predicted.

They are collected in one streaming pass. A fold that changes the key rows by Δ costs about
½ tr(G Δ C Δᵀ) nats per token (K-FAC, arXiv 1503.05671), with
C the second moment of the attention's input and G that of the gradient of the log likelihood at the keys;
values likewise. Labels are drawn from the model itself, so that G is the true Fisher. The reduction is
in moments.py; the passes are in passes.py (the whole model in memory) and layerwise.py (one layer).

Legend: attention.py; E = D + 1, the input with the constant 1 as its last entry; T tokens of a sequence and
distances; B sequences of a batch; X = B·T tokens of a batch; V vocabulary. Projections are seen before RoPE,
in the half layout.
"""

import hashlib
import json
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...checkpoints.shards import is_finite
from ...core.disk import DiskError, disk_sentence
from ...core.errors import InvalidInput
from ...core.files import PREFIX, whole_file
from ...core.untrusted import parse_json, printable

SCHEMA = 3
# With so many digits the header grows by 64 bytes. So tensors keep the alignment that they have in a file
# without a run or a source, and with it the last bit of what is computed from them.
RUN_DIGITS, SOURCE_DIGITS = 49, 46
_METADATA = "kvfold.statistics"  # key of the file's metadata
_METADATA_BYTES = 2**16
_IDS = "ids_BT"
_MOST_LAYERS = 10_000  # no model has a tenth of it
_SAMPLES = ("input_BTD", "output_BTD")  # bfloat16; all else is float64
_LATER = {"first_key_fisher", "first_value_fisher", "first_NT"}  # all of them, or in earlier files none
_DIMENSIONS = {
    "input_EE": 2,
    "query_NHH": 3,
    "key_fisher": 2,
    "value_fisher": 2,
    "query_fisher": 3,
    "distance_NT": 2,
    "output_fisher": 2,
    "input_BTD": 3,
    "output_BTD": 3,
    "first_key_fisher": 2,
    "first_value_fisher": 2,
    "first_NT": 2,
}


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Means of one layer over tokens, float64, on the CPU, and a sample of its inputs.

    Attributes:
        input_EE: C = E[x̃ x̃ᵀ], x̃ = [x; 1] with x the input of the q, k and v projections; the last row is
            the mean.
        query_NHH: E[q qᵀ] of every query head, bias included.
        key_fisher: G_K (K·H, K·H), E[g gᵀ] with g the gradient of a sequence's log likelihood, nats, at the
            keys of one token.
        value_fisher: G_V, the same at the values.
        query_fisher: G_Q (N, H, H), the same at every query head. All heads together gain nothing over
            that (docs/notes/queries.md).
        distance_NT: the distribution of a query head's attention p over distances Δ = query - key position:
            the mass of p(1-p), which an error in a score moves. Rows sum to 1.
        output_fisher: the same as G_K at the attention's output, (D, D).
        input_BTD: the first sequences' inputs of the projections, bfloat16; at most 32768 tokens.
        output_BTD: the outputs of the attention for the first of them, bfloat16.
        first_key_fisher: the part of `key_fisher` that is of the first token of each sequence. Models attend
            to that token whatever it is (an attention sink, arXiv 2309.17453), so it has most of the gradient
            and next to none of the inputs. None in files of kvfold before 2026-11-25.
        first_value_fisher: the part of `value_fisher` that is. None as above.
        first_NT: the part of `distance_NT` that is at that token's key. None as above.
    """

    input_EE: Tensor
    query_NHH: Tensor
    key_fisher: Tensor
    value_fisher: Tensor
    query_fisher: Tensor
    distance_NT: Tensor
    output_fisher: Tensor
    input_BTD: Tensor
    output_BTD: Tensor
    first_key_fisher: Tensor | None = None
    first_value_fisher: Tensor | None = None
    first_NT: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the statistics that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def sizes(self) -> tuple[int, int, int, int]:
        """Return D, N, K·H and H."""
        heads, width = self.query_NHH.shape[:2]
        return self.output_fisher.shape[0], heads, self.key_fisher.shape[0], width

    def through_channels(self, scale_D: Tensor) -> "LayerStatistics":
        """Return the statistics for an input whose channels are divided by these powers of two."""
        scale_E = torch.cat([scale_D, scale_D.new_ones(1)])
        return replace(
            self,
            input_EE=self.input_EE / scale_E / scale_E[:, None],
            input_BTD=self.input_BTD / scale_D.to(self.input_BTD.dtype),
        )

    def copied(self) -> "LayerStatistics":
        """Return the same numbers in memory that torch has allocated.

        Tensors of a file are aligned as the file has them. The last bit of a sum depends on the alignment, so
        only copies give the bits that the numbers gave before they were saved.
        """
        return LayerStatistics(**{name: tensor.clone() for name, tensor in self.tensors().items()})

    def parked(self, work: Path) -> "LayerStatistics":
        """Return the same numbers in unnamed files of a directory, read when they are used.

        The numbers of all layers together may exceed memory.
        """
        mapped = {}
        with tempfile.TemporaryDirectory(dir=work, prefix=PREFIX) as name:
            for key, tensor in self.tensors().items():
                file = Path(name) / key
                file.write_bytes(tensor.contiguous().view(torch.uint8).numpy().data)
                # Mapped, the file lives on without its name.
                flat = torch.from_file(str(file), shared=False, size=tensor.numel(), dtype=tensor.dtype)
                mapped[key] = flat.view(tensor.shape)
        return LayerStatistics(**mapped)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of all layers, and their origin.

    Attributes:
        layers: of the layers that attend, in the model's order.
        tokens: the number of tokens that were read.
        calibration: `self`, `text:<name>`, ...
        seed: the seed of the draw of tokens and labels.
        reach: the position from which the source's own text breaks down; None where none is known.
        ids_BT: the tokens, int64, which some rules read again; None in files of kvfold before 2026-11-23.
        source: hexadecimal digits that identify the model's weights; empty in files before 2026-11-29.
    """

    layers: tuple[LayerStatistics, ...]
    tokens: int
    calibration: str
    seed: int
    reach: int | None = None
    ids_BT: Tensor | None = None
    source: str = ""

    def origin(self) -> dict[str, Any]:
        """Return the text, its tokens, those of a sequence and the seed, for the record.

        Where distances were extrapolated or left out (`text_length.at_context`), their number is given too.
        """
        length = self.layers[0].input_BTD.shape[1]
        context = max(layer.distance_NT.shape[1] for layer in self.layers)
        reached = {} if context == length else {"context": context}
        return {
            "text": self.calibration,
            "tokens": self.tokens,
            "length": length,
            **reached,
            "seed": self.seed,
        }

    def save(self, file: Path, run: str = "") -> None:
        """Write a safetensors file, which must not exist; it appears only once it is complete.

        Args:
            file: the file.
            run: hexadecimal SHA-256 of everything that decides the numbers. `RUN_DIGITS` of it are saved, by
                which `read_run` recognises the file.

        Raises:
            InvalidInput: the file exists or cannot be written.
        """
        if file.exists():
            raise InvalidInput(
                f"{file} exists, and nothing is overwritten; name another file for the statistics"
            )
        about = {
            "tokens": self.tokens,
            "calibration": self.calibration,
            "seed": self.seed,
            "layers": len(self.layers),
        }
        if self.reach is not None:
            about["reach"] = self.reach
        if self.source:
            about["source"] = self.source
        if run:
            about["run"] = run[:RUN_DIGITS]
        tensors = {
            f"{n}.{name}": tensor.contiguous()
            for n, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
        if self.ids_BT is not None:
            tensors[_IDS] = self.ids_BT.contiguous()
        try:
            with whole_file(file) as temporary:
                save_file(tensors, temporary, {_METADATA: json.dumps({"schema": SCHEMA, **about})})
        except DiskError as error:
            raise InvalidInput(f"the statistics {disk_sentence(error)}") from None
        except OSError as error:
            raise InvalidInput(f"cannot write the statistics {file}: {error}") from None

    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, of all numbers and of their origin."""
        digest = hashlib.sha256(json.dumps([self.tokens, self.calibration, self.seed]).encode())
        for layer in self.layers:
            for tensor in layer.tensors().values():
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @classmethod
    def load(cls, file: Path) -> "Statistics":
        """Read statistics that `save` wrote.

        Raises:
            InvalidInput: the file is missing or damaged, or holds no statistics.
        """
        try:
            if not file.is_file():
                raise FileNotFoundError(f"{file} is not a regular file")
            with safe_open(file, "pt") as stored:
                about = _read_origin(stored.metadata(), file)
                held = set(stored.keys())
                layers = tuple(_read_layer(stored, held, n, file) for n in range(about.pop("layers")))
                ids_BT = _read_ids(stored, about["tokens"], file) if _IDS in held else None
        except InvalidInput:
            raise
        except (OSError, SafetensorError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InvalidInput(
                f"{file} holds no statistics that kvfold wrote ({type(error).__name__}: {reason})"
            ) from None
        found = cls(layers=layers, **about, ids_BT=ids_BT)
        found.check(file)
        return found

    def check(self, file: Path) -> None:
        """Check shape, dtype and finiteness of every tensor of every layer.

        Widths and counts of heads may differ between layers.

        Args:
            file: the file that holds the statistics, for the error.

        Raises:
            InvalidInput: a tensor is of another shape or dtype, or holds NaN or infinite values.
        """
        samples, length = self.layers[0].input_BTD.shape[:2]
        rest = self.layers[0].output_BTD.shape[0]
        hidden = self.layers[0].sizes()[0]
        for n, layer in enumerate(self.layers):
            _, heads, keys, width = layer.sizes()
            wanted = {
                "input_EE": (hidden + 1, hidden + 1),
                "query_NHH": (heads, width, width),
                "key_fisher": (keys, keys),
                "value_fisher": (keys, keys),
                "query_fisher": (heads, width, width),
                "distance_NT": (heads, length),
                "output_fisher": (hidden, hidden),
                "input_BTD": (samples, length, hidden),
                "output_BTD": (rest, length, hidden),
                "first_key_fisher": (keys, keys),
                "first_value_fisher": (keys, keys),
                "first_NT": (heads, length),
            }
            for name, tensor in layer.tensors().items():
                shape = wanted[name]
                if tuple(tensor.shape) != shape or 0 in shape:
                    raise InvalidInput(
                        f"{file} holds {n}.{name} of shape {tuple(tensor.shape)}, expected {shape}; "
                        "collect the statistics again"
                    )
                if not is_finite(tensor):
                    raise InvalidInput(
                        f"{file} holds NaN or infinite values in {n}.{name}, expected finite ones; "
                        "collect the statistics again"
                    )


def _read_origin(metadata: dict[str, str] | None, file: Path) -> dict[str, Any]:
    """Return the origin of statistics and the number of layers, from a file's metadata."""
    text = (metadata or {}).get(_METADATA)
    if text is None:
        raise ValueError(f"its metadata has no {_METADATA}")
    about = parse_json(text, f"the metadata of {printable(file)}", _METADATA_BYTES)
    if about.get("schema") != SCHEMA:
        raise InvalidInput(f"{file} holds statistics of another kvfold; collect them again")
    wanted = {"tokens": int, "calibration": str, "seed": int, "layers": int}
    for name, kind in wanted.items():
        if type(about.get(name)) is not kind:
            raise ValueError(f"{name} in its metadata is not of type {kind.__name__}")
    if not (about["tokens"] > 0 and 0 < about["layers"] <= _MOST_LAYERS):
        raise ValueError("tokens and layers in its metadata are out of range")
    reach = about.get("reach")
    if not (reach is None or (type(reach) is int and reach > 0)):
        raise ValueError("reach in its metadata is no position")
    source = about.get("source", "")
    if type(source) is not str:
        raise ValueError("source in its metadata is no text")
    return {**{name: about[name] for name in wanted}, "reach": reach, "source": source}


def _read_layer(stored: Any, held: set[str], layer: int, file: Path) -> LayerStatistics:
    """Return one layer's tensors of a file; their shapes are still to be checked."""
    tensors = {}
    for name in (field.name for field in fields(LayerStatistics)):
        key = f"{layer}.{name}"
        if key not in held:
            if name in _LATER and not any(f"{layer}.{later}" in held for later in _LATER):
                continue
            raise ValueError(f"it lacks {key}")
        tensor = stored.get_tensor(key)
        wanted = torch.bfloat16 if name in _SAMPLES else torch.float64
        if tensor.dtype != wanted or tensor.ndim != _DIMENSIONS[name]:
            raise InvalidInput(
                f"{file} holds {key} as {tensor.ndim}-dimensional {tensor.dtype}, expected "
                f"{_DIMENSIONS[name]}-dimensional {wanted}; collect the statistics again"
            )
        tensors[name] = tensor
    return LayerStatistics(**tensors)


def _read_ids(stored: Any, tokens: int, file: Path) -> Tensor:
    """Return the tokens of a file of statistics (B, T).

    Raises:
        InvalidInput: they are not as many as the metadata says, or no token ids.
    """
    ids_BT: Tensor = stored.get_tensor(_IDS)
    shape = tuple(ids_BT.shape)
    if ids_BT.dtype != torch.int64 or len(shape) != 2 or ids_BT.numel() != tokens or bool((ids_BT < 0).any()):
        raise InvalidInput(
            f"{file} holds {_IDS} as {ids_BT.dtype} of shape {shape}, expected {tokens} token ids in "
            "sequences; collect the statistics again"
        )
    return ids_BT


def read_run(file: Path) -> str:
    """Return what `Statistics.save` was given as `run`; empty for any other file.

    Args:
        file: a file of statistics, or anything else.
    """
    if not file.is_file():
        return ""
    try:
        with safe_open(file, "pt") as stored:
            about = parse_json((stored.metadata() or {}).get(_METADATA, "{}"), file.name, _METADATA_BYTES)
            return str(about.get("run", ""))
    except (OSError, SafetensorError, ValueError):
        return ""
