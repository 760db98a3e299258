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
        architecture: its causal language model in transformers.
        defaults: what its configuration class assumes where config.json says nothing.
        q, k, v, o: the four projections, without `.weight` or `.bias`.
        layer_tensors, model_tensors: the others that a whole checkpoint has; `head` only where it is not tied.
    """

    label: str
    architecture: str
    defaults: Mapping[str, Any]
    q: str = "model.layers.{layer}.self_attn.q_proj"
    k: str = "model.layers.{layer}.self_attn.k_proj"
    v: str = "model.layers.{layer}.self_attn.v_proj"
    o: str = "model.layers.{layer}.self_attn.o_proj"
    layer_tensors: tuple[str, ...] = (
        "model.layers.{layer}.input_layernorm.weight",
        "model.layers.{layer}.post_attention_layernorm.weight",
        "model.layers.{layer}.mlp.gate_proj.weight",
        "model.layers.{layer}.mlp.up_proj.weight",
        "model.layers.{layer}.mlp.down_proj.weight",
    )
    model_tensors: tuple[str, ...] = ("model.embed_tokens.weight", "model.norm.weight")
    head: str = "lm_head.weight"

    def projections(self, layer: int) -> dict[str, str]:
        """The names of a layer's projections by role."""
        return {role: getattr(self, role).format(layer=layer) for role in "qkvo"}


_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attention_dropout": 0.0,
    "use_cache": True,
}
FAMILIES = {
    "llama": Family(label="Llama", architecture="LlamaForCausalLM", defaults={**_COMMON, "mlp_bias": False}),
    "mistral": Family(
        label="Mistral",
        architecture="MistralForCausalLM",
        defaults={
            **_COMMON,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        label="Qwen2",
        architecture="Qwen2ForCausalLM",
        defaults={
            **_COMMON,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint.

    Raises:
        InvalidInput: an encoder, a quantised checkpoint, latent attention already, another head than a language model's, or a
            family that kvfold does not know.
    """
    kind = str(config.get("model_type"))
    known = ", ".join(sorted(FAMILIES))
    if kind in _ENCODERS or config.get("is_encoder_decoder"):
        raise InvalidInput(f"model_type {kind} is an encoder model, which kvfold cannot fold; it folds decoders: {known}")
    if kind in _LATENT:
        raise InvalidInput(f"model_type {kind} already has latent attention; kvfold folds {known}")
    if kind not in FAMILIES:
        raise InvalidInput(f"model_type {kind!r} is not one that kvfold knows: {known}")
    family = FAMILIES[kind]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise InvalidInput(
            f"config.json has architectures {architectures}; kvfold folds causal language models: {family.architecture}"
        )
    if config.get("quantization_config"):
        quantised = config["quantization_config"]
        method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised
        raise InvalidInput(f"the checkpoint is quantised ({method}); fold the unquantised one, then quantise the result")
    return family


def geometry_of(config: Mapping[str, Any]) -> Geometry:
    """The attention shape that a config (with its family's defaults) states.

    Raises:
        InvalidInput: a size is no positive number, or the sizes do not fit together.
    """
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "max_position_embeddings", "num_key_value_heads", "head_dim"):  # fmt: skip
        value, optional = config.get(key), key in {"num_key_value_heads", "head_dim"}
        if not (optional and value is None) and (not isinstance(value, int) or value < 1):
            raise InvalidInput(f"config.json has {key} {value!r}, where a positive number is needed")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise InvalidInput(f"config.json is inconsistent: {heads} query heads do not share {kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise InvalidInput(f"config.json has head_dim {head_dim}; rotary heads have an even one")
    return Geometry(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)


def check_for_latent(config: Mapping[str, Any]) -> None:
    """Refuse what the stock latent class cannot hold.

    Raises:
        InvalidInput: sliding-window attention in use, biases in the MLP, or a partial rotary part.
    """
    window, positions = config.get("sliding_window"), config["max_position_embeddings"]
    if window and config.get("use_sliding_window", True) and (not isinstance(window, int) or window < positions):
        raise InvalidInput(
            f"sliding_window {window!r} is shorter than max_position_embeddings {positions}, and no stock MLA class has "
            "a window; use --to gqa, or set max_position_embeddings to the window if longer inputs are not needed"
        )
    if config.get("mlp_bias"):
        raise InvalidInput("mlp_bias is true, and the stock MLA class has no MLP biases; use --to gqa")
    rope = config.get("rope_parameters")
    partial = config.get("partial_rotary_factor") or (rope.get("partial_rotary_factor") if isinstance(rope, dict) else None)
    if partial not in (None, 1, 1.0):
        raise InvalidInput(f"partial_rotary_factor is {partial}, and MLA is for heads that are rotary as a whole; use --to gqa")
