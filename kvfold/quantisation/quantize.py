"""The execution of `kvfold quantize`: choose weights, round them in pieces of rows, copy everything else."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.directory import Checkpoint, check_output, check_side_files, copy_side_files
from ..checkpoints.identity import check_unchanged
from ..checkpoints.quantised.packed_checkpoint import is_quantised
from ..checkpoints.quantised.packed_tensor import module_of
from ..checkpoints.record import is_folded, next_record, write_record
from ..checkpoints.shards import SHARD_SIZE, ShardWriter, TensorSpec
from ..convert.families.recognition import is_multimodal
from ..core.console import progress
from ..core.errors import InvalidInput
from ..core.files import check_makeable, write_json
from ..core.version import __version__
from ..core.work import whole_directory
from ..models.code_files import config_for_copy
from ..models.remote_code import carries_own_code, ship
from .chosen_weights import LATENT, RoundedWeights, choose_weights
from .request import SCHEMES
from .weight_rounding import Rounding, check_package, rounding

STAGE = "quantize"


@dataclass(frozen=True, kw_only=True)
class QuantizePlan:
    """A checked request.

    Attributes:
        checkpoint: what is quantised.
        out: the output directory.
        scheme: of `SCHEMES`.
        rounding: the scheme with its groups.
        chosen: the weights that are rounded.
        specs: every tensor of the output, in order.
        dtype: of the scales, and of what is not rounded.
    """

    checkpoint: Checkpoint
    out: Path
    scheme: str
    rounding: Rounding
    chosen: RoundedWeights
    specs: dict[str, TensorSpec]
    dtype: torch.dtype

    @property
    def command(self) -> str:
        """The command that writes the same output again."""
        group = [] if self.chosen.group is None else ["--group-size", str(self.chosen.group)]
        words = ["kvfold", "quantize", str(self.checkpoint.directory), "--scheme", self.scheme, *group]
        return shlex.join([*words, "--out", str(self.out)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the scheme, the bytes, what is rounded and what is left."""
        stored = {name: self.checkpoint.spec(name) for name in self.checkpoint}
        numbers = {name: math.prod(spec.shape) for name, spec in stored.items()}
        return {
            "scheme": self.scheme,
            "group_size": self.chosen.group,
            "format": self.rounding.format,
            "rounded_weights": len(self.chosen.rounded),
            "rounded_share": sum(numbers[name] for name in self.chosen.rounded) / sum(numbers.values()),
            "bytes_before": sum(spec.nbytes for spec in stored.values()),
            "bytes_after": sum(spec.nbytes for spec in self.specs.values()),
            "left": {reason: list(modules) for reason, modules in self.chosen.left.items()},
        }


def plan_quantize(
    directory: Path,
    scheme: str,
    out: Path | None,
    *,
    group: int | None = None,
    kept: tuple[str, ...] = LATENT,
) -> QuantizePlan:
    """Check a request, and decide which weights are rounded. Nothing is written.

    Args:
        directory: a checkpoint, folded or not.
        scheme: of `SCHEMES`.
        out: the output directory, which must not exist; None: `./<name>-<scheme>`.
        group: columns that share a scale; None: see `choose_weights`.
        kept: last parts of the names of modules that are left as they are.

    Raises:
        InvalidInput: the scheme has no groups, the checkpoint is quantised already or cannot
            be, compressed-tensors is missing, or the output cannot be written.
    """
    if group is not None and not SCHEMES[scheme].grouped:
        raise InvalidInput(f"--group-size has no effect on --scheme {scheme}, whose scales belong to rows")
    check_package()
    if is_quantised(directory):
        other = "" if is_folded(directory) else ", or fold it with kvfold convert --dequantize"
        raise InvalidInput(
            f"{directory} is quantised already; quantise the unquantised checkpoint that it was made "
            f"of{other}"
        )
    checkpoint = Checkpoint(directory)
    if is_multimodal(checkpoint.config):
        raise InvalidInput(
            f"{directory} is a multimodal checkpoint, which kvfold quantize does not round; give a causal "
            "language model, such as a text tower alone"
        )
    out = Path(f"{directory.resolve().name}-{scheme}") if out is None else out
    check_output(out, directory)
    check_side_files(directory)
    chosen = choose_weights(checkpoint, grouped=SCHEMES[scheme].grouped, group=group, kept=kept)
    made = rounding(scheme, chosen.group)
    dtype = checkpoint.spec(chosen.rounded[0]).dtype
    rounded = set(chosen.rounded)
    specs: dict[str, TensorSpec] = {}
    for name in checkpoint:
        spec = checkpoint.spec(name)
        if name in rounded:
            parts = made.specs(spec.shape, dtype)
            specs |= {f"{module_of(name)}.{part}": found for part, found in parts.items()}
        else:
            specs[name] = spec
    return QuantizePlan(
        checkpoint=checkpoint, out=out, scheme=scheme, rounding=made, chosen=chosen, specs=specs, dtype=dtype
    )


def write_quantized(plan: QuantizePlan, shard_size: int = SHARD_SIZE) -> dict[str, Any]:
    """Write the output that a plan describes. It appears whole or not at all.

    A weight is read, rounded and written in pieces of rows, so memory holds some MB more than the model's
    class without weights.

    Returns:
        The record that is in the output's kvfold.json.

    Raises:
        InvalidInput: the output exists by now or cannot be written, the disk is too small, a weight is NaN or
            infinite, or the checkpoint changed meanwhile.
    """
    from ..convert.write.model_card import write_card

    source = plan.checkpoint.directory
    record = {
        **next_record(source, STAGE),
        "kvfold": __version__,
        "quantize": {"command": plan.command, **plan.to_dict()},
    }
    check_makeable(plan.out)
    with whole_directory(plan.out, "quantisation") as place:
        with ShardWriter(place, plan.specs, shard_size) as writer:
            rounded = set(plan.chosen.rounded)
            for name in progress(plan.checkpoint, "quantize", len(plan.checkpoint)):
                if name in rounded:
                    _write_rounded(plan, name, writer)
                else:
                    for first, piece in plan.checkpoint.stream(name):
                        writer.write(name, piece, first)
        copy_side_files(source, place)
        if carries_own_code(source):
            ship(source, place)
        config = config_for_copy(source)
        config["quantization_config"] = plan.rounding.config(plan.chosen.ignore)
        write_json(place / "config.json", config)
        record = write_record(place, record)
        write_card(place, record)
        check_unchanged(plan.checkpoint)
    return record


def _write_rounded(plan: QuantizePlan, name: str, writer: ShardWriter) -> None:
    """Round a weight in pieces of whole rows, and write its parts."""
    shape = plan.checkpoint.spec(name).shape
    whole = plan.rounding.whole_parts(shape)
    for part, tensor in whole.items():
        writer.write(f"{module_of(name)}.{part}", tensor)
    for first, piece in plan.checkpoint.stream(name, by_rows=True):
        parts = plan.rounding.parts(piece.unflatten(0, (-1, shape[1])), plan.dtype)
        for part, tensor in parts.items():
            if part not in whole:
                writer.write(
                    f"{module_of(name)}.{part}", tensor, first // shape[1] * math.prod(tensor.shape[1:])
                )
