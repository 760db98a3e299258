"""The choice of weights that `kvfold quantize` rounds, and the reasons for those that it leaves.

What is rounded are linear modules inside the decoder's layers. The class of the checkpoint, built without
weights, says which modules are linear; experts that transformers joins are known by their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.quantised.packed_tensor import module_of
from ..core.errors import InvalidInput
from .request import GROUPS, LEAST_GROUP

if TYPE_CHECKING:
    from ..checkpoints.directory import Checkpoint

# Modules of latent attention, of every container. `kv_a` writes the cache. `kv_b` is absorbed into queries
# and outputs in decoding, for which engines dequantise it; remote containers multiply its weight directly.
LATENT = ("kv_a_proj_with_mqa", "kv_a_proj", "kv_b_proj")
_ROUTERS = ("gate", "router", "shared_expert_gate")
_MIXERS = ("linear_attn", "mamba", "conv")  # layers without attention: states that errors add up in
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..+\.weight$")
# Modules that vLLM joins to one, which must then have one scheme.
_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass(frozen=True, kw_only=True)
class RoundedWeights:
    """The weights of a checkpoint that are rounded.

    Attributes:
        rounded: names of the tensors, in the order of the checkpoint.
        left: for each reason the modules of the decoder's layers that are left as they are.
        ignore: every module with an unquantised matrix, for `quantization_config`.
        group: columns that share a scale; None where a whole row does.
    """

    rounded: tuple[str, ...]
    left: Mapping[str, tuple[str, ...]]
    ignore: tuple[str, ...]
    group: int | None


def choose_weights(
    checkpoint: Checkpoint, *, grouped: bool, group: int | None, kept: Collection[str]
) -> RoundedWeights:
    """Choose the weights to round.

    Args:
        checkpoint: an unquantised one.
        grouped: whether the scheme has a scale per group of columns.
        group: columns of a group; None: the largest of `GROUPS` that divides every width, or else the one
            that leaves the fewest numbers unquantised.
        kept: last parts of the names of modules that are left as they are.

    Raises:
        InvalidInput: transformers cannot build the model, it has no linear module, or the group divides no
            width.
    """
    from accelerate import init_empty_weights

    from ..models.causal_lm import build_empty
    from ..models.decoder import layer_list

    with init_empty_weights():
        model = build_empty(checkpoint.directory, None, torch.bfloat16)
    stack = layer_list(model)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    inside = [name for name in checkpoint if name.startswith(f"{stack}.") and name.endswith(".weight")]
    candidates = [
        name
        for name in inside
        if len(checkpoint.spec(name).shape) == 2 and (module_of(name) in linear or _EXPERT.match(name))
    ]
    if not candidates:
        raise InvalidInput(
            f"{checkpoint.directory} has no linear module in its layers that can be quantised: a "
            f"{type(model).__name__} computes them otherwise"
        )
    left = {name: reason for name in candidates if (reason := _reason(name, kept))}
    specs = {name: checkpoint.spec(name) for name in candidates}
    if grouped:
        widths = {name: spec for name, spec in specs.items() if name not in left}
        lost = {
            size: sum(math.prod(spec.shape) for spec in widths.values() if spec.shape[1] % size)
            for size in GROUPS
        }
        group = group or min(GROUPS, key=lambda size: (lost[size], -size))  # the largest of the best
        reason = f"groups of {group} do not divide their width"
        left |= {name: reason for name, spec in widths.items() if spec.shape[1] % group}
    left |= _with_joined(candidates, left)
    rounded = tuple(name for name in candidates if name not in left)
    if not rounded:
        columns = sorted({spec.shape[1] for name, spec in specs.items() if _reason(name, kept) == ""})
        raise InvalidInput(
            f"groups of {group} divide no width of a linear module in {checkpoint.directory} (widths "
            f"{', '.join(map(str, columns))}); use {_fitting(columns)}a scheme without groups"
        )
    reasons = dict.fromkeys(left.values())
    return RoundedWeights(
        rounded=rounded,
        left={why: tuple(module_of(name) for name in left if left[name] == why) for why in reasons},
        ignore=_unquantised(checkpoint, model, set(rounded)),
        group=group if grouped else None,
    )


def _reason(name: str, kept: Collection[str]) -> str:
    """Return why a weight is left whatever its shape; empty where it is not."""
    parts = module_of(name).split(".")
    if parts[-1] in kept:
        return "latent attention's projections to and from the cache stay as they are"
    if parts[-1] in _ROUTERS:
        return "routers of experts stay as they are"
    if any(part in _MIXERS for part in parts):
        return "layers without attention keep their mixers as they are"
    return ""


def _fitting(columns: Iterable[int]) -> str:
    """Return an option with group sizes that divide a width, or else divisors of all, as words of advice."""
    shared = math.gcd(*columns)
    sizes = [group for group in GROUPS if any(width % group == 0 for width in columns)]
    sizes = sizes or [group for group in range(shared, LEAST_GROUP - 1, -1) if shared % group == 0][:3]
    return f"--group-size {', '.join(map(str, sizes))}, or " if sizes else ""


def _with_joined(candidates: Iterable[str], left: Mapping[str, str]) -> dict[str, str]:
    """Return the weights that are left since another one that vLLM joins them with is."""
    members: dict[str, list[str]] = {}
    for name in candidates:
        expert = _EXPERT.match(name)
        place, _, leaf = module_of(name).rpartition(".")
        for names in _JOINED:
            if leaf in names and expert is None:
                members.setdefault(f"{place}.{'+'.join(names)}", []).append(name)
        if expert is not None:
            members.setdefault(expert[1], []).append(name)
    reason = "vLLM joins them with modules that are left"
    return {
        name: reason
        for names in members.values()
        if any(name in left for name in names)
        for name in names
        if name not in left
    }


def _unquantised(checkpoint: Checkpoint, model: Any, rounded: Collection[str]) -> tuple[str, ...]:
    """Return the modules of all other matrices, and the head, which need not be stored."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    plain = [
        module_of(name)
        for name in checkpoint
        if name.endswith(".weight") and len(checkpoint.spec(name).shape) > 1 and name not in rounded
    ]
    plain = [name for name in plain if name != names[id(embedding)]]
    return tuple(dict.fromkeys([*plain, *([] if head is None else [names[id(head)]])]))
