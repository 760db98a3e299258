"""Where each family of checkpoints keeps its attention: a row a family. A foreign weight's name stands here only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidInput
from .target import Geometry

# Model types that read a whole text at once: there is no KV cache to fold.
_ENCODERS = {
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta",
    "xlm-roberta", "bart", "mbart", "marian", "t5", "mt5", "umt5", "pegasus", "clip", "siglip", "vit", "whisper",
}  # fmt: skip
_LATENT = {"deepseek_v2", "deepseek_v3", "youtu", "minicpm3"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's row; `{layer}` stands for the layer's number.

    Attributes:
        label: what people call the family.
        q, k, v, o: the four projections, without `.weight` or `.bias`.
        refused: config fields whose truth makes the family's model one that MLA's stock class cannot hold.
    """

    label: str
    q: str = "model.layers.{layer}.self_attn.q_proj"
    k: str = "model.layers.{layer}.self_attn.k_proj"
    v: str = "model.layers.{layer}.self_attn.v_proj"
    o: str = "model.layers.{layer}.self_attn.o_proj"

    def projections(self, layer: int) -> dict[str, str]:
        """The names of a layer's projections by role."""
        return {role: getattr(self, role).format(layer=layer) for role in "qkvo"}


FAMILIES = {
    "llama": Family(label="Llama"),
    "mistral": Family(label="Mistral"),
    "qwen2": Family(label="Qwen2"),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint.

    Raises:
        InvalidInput: an encoder, a quantised checkpoint, latent attention already, or a family that kvfold does not know.
    """
    kind = config.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if kind in _ENCODERS or config.get("is_encoder_decoder"):
        raise InvalidInput(f"model_type {kind} is an encoder model, which kvfold cannot fold; it folds decoders: {known}")
    if kind in _LATENT:
        raise InvalidInput(f"model_type {kind} already has latent attention; kvfold folds {known}")
    if kind not in FAMILIES:
        raise InvalidInput(f"model_type {kind!r} is not one that kvfold knows: {known}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise InvalidInput(f"the checkpoint is quantised ({method}); fold the unquantised one, then quantise the result")
    return FAMILIES[kind]


def geometry_of(config: Mapping[str, Any]) -> Geometry:
    """The attention shape that config.json states.

    Raises:
        InvalidInput: a size is missing or the sizes do not fit together.
    """
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise InvalidInput(f"config.json has {key} {config.get(key)!r}, where a positive number is needed")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if kv_heads < 1 or heads % kv_heads:
        raise InvalidInput(f"config.json is inconsistent: {heads} query heads do not share {kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise InvalidInput(f"config.json has head_dim {head_dim}; rotary heads have an even one")
    return Geometry(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)


def check_for_latent(config: Mapping[str, Any]) -> None:
    """Refuse what the stock latent class cannot hold.

    Raises:
        InvalidInput: sliding-window attention in use, biases in the MLP, or a partial rotary part.
    """
    window, positions = config.get("sliding_window"), int(config.get("max_position_embeddings") or 0)
    if window and window < positions and config.get("use_sliding_window", True):
        raise InvalidInput(
            f"sliding_window {window} is shorter than max_position_embeddings {positions}, and no stock MLA class has "
            "a window; use --to gqa, or set max_position_embeddings to the window if longer inputs are not needed"
        )
    if config.get("mlp_bias"):
        raise InvalidInput("mlp_bias is true, and the stock MLA class has no MLP biases; use --to gqa")
