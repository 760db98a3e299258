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
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.files import whole_file

SCHEMA = 3
# With so many digits the header grows by 64 bytes. So tensors keep the alignment that they have in a file
# without a run, and with it the last bit of what is computed from them.
RUN_DIGITS = 49
_METADATA = "kvfold.statistics"  # key of the file's metadata


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
            that (LOG.md).
        distance_NT: the distribution of a query head's attention p over distances Δ = query - key position:
            the mass of p(1-p), which an error in a score moves. Rows sum to 1.
        output_fisher: the same as G_K at the attention's output, (D, D).
        input_BTD: the first sequences' inputs of the projections, bfloat16; at most 32768 tokens.
        output_BTD: the outputs of the attention for the first of them, bfloat16.
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
        with tempfile.TemporaryDirectory(dir=work) as name:
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
        layers: in the model's order.
        tokens: the number of tokens that were read.
        calibration: `self`, `text:<name>`, ...
        seed: the seed of the draw of tokens and labels.
    """

    layers: tuple[LayerStatistics, ...]
    tokens: int
    calibration: str
    seed: int

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
        if run:
            about["run"] = run[:RUN_DIGITS]
        tensors = {
            f"{n}.{name}": tensor.contiguous()
            for n, layer in enumerate(self.layers)
            for name, tensor in vars(layer).items()
        }
        try:
            with whole_file(file) as temporary:
                save_file(tensors, temporary, {_METADATA: json.dumps({"schema": SCHEMA, **about})})
        except (OSError, SafetensorError) as error:
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
        """Read statistics that `save` wrote.

        Raises:
            InvalidInput: the file is missing or damaged, or holds no statistics.
        """
        try:
            with safe_open(file, "pt") as stored:
                about = json.loads((stored.metadata() or {})[_METADATA])
                if about.pop("schema") != SCHEMA:
                    raise InvalidInput(f"{file} holds statistics of another kvfold; collect them again")
                about.pop("run", None)
                names = [field.name for field in fields(LayerStatistics)]
                layers = tuple(
                    LayerStatistics(**{name: stored.get_tensor(f"{n}.{name}") for name in names})
                    for n in range(about.pop("layers"))
                )
                return cls(layers=layers, **about)
        except InvalidInput:
            raise
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"{file} holds no statistics that kvfold wrote ({type(error).__name__}: {error})"
            ) from None


def read_run(file: Path) -> str:
    """Return what `Statistics.save` was given as `run`; empty for any other file.

    Args:
        file: a file of statistics, or anything else.
    """
    try:
        with safe_open(file, "pt") as stored:
            about = json.loads((stored.metadata() or {})[_METADATA])
            return str(about.get("run", ""))
    except (OSError, SafetensorError, KeyError, AttributeError, ValueError, RecursionError):
        return ""
