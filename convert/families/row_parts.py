"""Names and sentences that rows of the table of families share."""

from typing import Any

EXPERTS = "its MLPs are mixtures of experts"
LAYERNORM = "it has LayerNorm with a mean and a bias, and an MLP without a gate"
ADDED = "it normalises what a layer adds to the residual stream"
PARALLEL = "its attention and MLP read one norm in parallel"


def layer_names(*names: str, at: str = "layers.{layer}.") -> tuple[str, ...]:
    """Return names of a layer's tensors."""
    return tuple(at + name for name in names)


def affine(*names: str) -> tuple[str, ...]:
    """Return weight and bias of each module."""
    return tuple(f"{name}.{part}" for name in names for part in ("weight", "bias"))


GATED = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
FUSED_GATE = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
AFTER = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
SANDWICH = (*NORMS, "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
QK_NORM: dict[str, Any] = {
    "q_norm": "layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "layers.{layer}.self_attn.k_norm.weight",
}
