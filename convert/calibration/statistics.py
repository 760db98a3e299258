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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
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
# The sizes of each tensor: D hidden size, E = D + 1, N query heads, H head dim, S = K·H, T distances and
# tokens of a sequence, B sequences of the inputs and R of the outputs. Samples are bfloat16, others float64.
_SIZES = {
    "input_EE": "EE",
    "query_NHH": "NHH",
    "key_fisher": "SS",
    "value_fisher": "SS",
    "query_fisher": "NHH",
    "distance_NT": "NT",
    "output_fisher": "DD",
    "input_BTD": "BTD",
    "output_BTD": "RTD",
    "first_key_fisher": "SS",
    "first_value_fisher": "SS",
    "first_NT": "NT",
}
_SAMPLES = ("input_BTD", "output_BTD")


class _Origin(BaseModel):
    """The metadata of a file of statistics."""

    model_config = ConfigDict(strict=True)

    tokens: PositiveInt
    calibration: str
    seed: int
    layers: Annotated[int, Field(gt=0, le=10_000)]  # no model has a tenth of it
    reach: PositiveInt | None = None
    source: str = ""


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
            and next to none of the inputs.
        first_value_fisher: the part of `value_fisher` that is.
        first_NT: the part of `distance_NT` that is at that token's key.
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
    first_key_fisher: Tensor
    first_value_fisher: Tensor
    first_NT: Tensor

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
        return LayerStatistics(**{name: tensor.clone() for name, tensor in vars(self).items()})

    def parked(self, work: Path) -> "LayerStatistics":
        """Return the same numbers in unnamed files of a directory, read when they are used.

        The numbers of all layers together may exceed memory.
        """
        mapped = {}
        with tempfile.TemporaryDirectory(dir=work, prefix=PREFIX) as name:
            for key, tensor in vars(self).items():
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
        ids_BT: the tokens, int64, which some rules read again.
        source: hexadecimal digits that identify the model's weights; empty in files of kvfold 0.1.0.
    """

    layers: tuple[LayerStatistics, ...]
    tokens: int
    calibration: str
    seed: int
    ids_BT: Tensor
    reach: int | None = None
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

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers."""
        return sum(tensor.nbytes for layer in self.layers for tensor in vars(layer).values())

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
            "schema": SCHEMA,
            "tokens": self.tokens,
            "calibration": self.calibration,
            "seed": self.seed,
            "layers": len(self.layers),
            "reach": self.reach,
            "source": self.source or None,
            "run": run[:RUN_DIGITS] or None,
        }
        about = {name: value for name, value in about.items() if value is not None}
        tensors = {
            f"{n}.{name}": tensor.contiguous()
            for n, layer in enumerate(self.layers)
            for name, tensor in vars(layer).items()
        }
        tensors[_IDS] = self.ids_BT.contiguous()
        try:
            with whole_file(file) as temporary:
                save_file(tensors, temporary, {_METADATA: json.dumps(about)})
        except DiskError as error:
            raise InvalidInput(f"the statistics {disk_sentence(error)}") from None
        except OSError as error:
            raise InvalidInput(f"cannot write the statistics {file}: {error}") from None

    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, of all numbers and of their origin."""
        digest = hashlib.sha256(json.dumps([self.tokens, self.calibration, self.seed]).encode())
        for layer in self.layers:
            for tensor in vars(layer).values():
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @classmethod
    def load(cls, file: Path) -> "Statistics":
        """Read statistics that `save` wrote."""
        try:
            if not file.is_file():
                raise FileNotFoundError(f"{file} is not a regular file")
            with safe_open(file, "pt") as stored:
                about = _read_origin(stored.metadata(), file)
                layers = tuple(
                    LayerStatistics(**{name: stored.get_tensor(f"{n}.{name}") for name in _SIZES})
                    for n in range(about.layers)
                )
                ids_BT = stored.get_tensor(_IDS)
        except InvalidInput:
            raise
        except (OSError, SafetensorError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InvalidInput(
                f"{file} holds no statistics that kvfold wrote ({type(error).__name__}: {reason})"
            ) from None
        found = cls(layers=layers, **about.model_dump(exclude={"layers"}), ids_BT=ids_BT)
        found.check(file)
        return found

    def check(self, file: Path) -> None:
        """Check dtype, shape and finiteness of every tensor that was read from a file.

        Widths and counts of heads may differ between layers.

        Raises:
            InvalidInput: names the first tensor that does not fit those before it, or is not finite.
        """
        sizes = dict[str, int]()
        for n, layer in enumerate(self.layers):
            sizes = {letter: size for letter, size in sizes.items() if letter not in "NSH"}
            for name, tensor in vars(layer).items():
                letters = [("D", -1) if letter == "E" else (letter, 0) for letter in _SIZES[name]]
                fits = len(letters) == tensor.ndim and all(
                    size + more == sizes.setdefault(letter, size + more)
                    for (letter, more), size in zip(letters, tensor.shape, strict=True)
                )
                fits &= tensor.dtype == (torch.bfloat16 if name in _SAMPLES else torch.float64)
                if not fits or not tensor.numel() or not is_finite(tensor):
                    raise _unfit(file, f"{n}.{name}", tensor)
        ids_BT = self.ids_BT
        is_text = ids_BT.dtype == torch.int64 and ids_BT.ndim == 2 and ids_BT.numel() == self.tokens
        if not is_text or bool((ids_BT < 0).any()):
            raise _unfit(file, _IDS, ids_BT)


def _unfit(file: Path, name: str, tensor: Tensor) -> InvalidInput:
    return InvalidInput(
        f"{file} holds {name} of {tensor.dtype} and shape {tuple(tensor.shape)}, which does not fit the rest "
        "of it or is not finite; collect the statistics again"
    )


def _read_origin(metadata: dict[str, str] | None, file: Path) -> _Origin:
    """Return the origin of statistics and the number of layers, from a file's metadata."""
    text = (metadata or {}).get(_METADATA)
    if text is None:
        raise ValueError(f"its metadata has no {_METADATA}")
    about = parse_json(text, f"the metadata of {printable(file)}", _METADATA_BYTES)
    if about.get("schema") != SCHEMA:
        raise InvalidInput(f"{file} holds statistics of another kvfold; collect them again")
    return _Origin.model_validate(about)


def read_run(file: Path) -> str:
    """Return what `Statistics.save` was given as `run`; empty for any other file."""
    if not file.is_file():
        return ""
    try:
        with safe_open(file, "pt") as stored:
            about = parse_json((stored.metadata() or {}).get(_METADATA, "{}"), file.name, _METADATA_BYTES)
            return str(about.get("run", ""))
    except (OSError, SafetensorError, ValueError):
        return ""
