"""Fields of config.json that kvfold or its outputs' classes divide by, or allocate by.

transformers' configuration classes check the types of the fields that they declare (recognition.py).
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

from ...core.errors import InvalidInput
from ...core.untrusted import shorten
from .layers.layer_kinds import ATTENTION

LARGEST = 2**31 - 1  # of sizes, positions and ids
_LARGEST_NUMBER = 1e30  # float32 has three times 10^38, and holds its products with a position
_SIZES = (
    "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size", "head_dim", "intermediate_size",
    "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "max_position_embeddings",
    "n_positions", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size", "num_local_experts",
    "num_experts_per_tok", "original_max_position_embeddings", "attention_chunk_size",
    "no_rope_layer_interval", "full_attention_interval", "attn_layer_period",
    "prefix_dense_sliding_window_pattern", "kv_lora_rank", "q_lora_rank", "v_head_dim",
)  # fmt: skip
_COUNTS = (
    "attn_layer_offset", "first_k_dense_replace", "sliding_window", "rotary_dim", "qk_nope_head_dim",
    "qk_rope_head_dim",
)  # fmt: skip
_POSITIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    "attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier", "logits_scaling",
    "swiglu_limit", "rope_theta", "rope_local_base_freq", "rotary_emb_base", "factor", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "alpha",
)  # fmt: skip
_FACTORS = ("mscale", "mscale_all_dim")
_SHARES = ("partial_rotary_factor", "rotary_pct")
# model_type -> the field in which transformers 4 has the base of layers with a window, whose table is default
# there. Other classes with a table for each kind of layer came with transformers 5.
WINDOWED_BASES = {"gemma3_text": "rope_local_base_freq", "olmo3": "rope_theta"}


def is_size(value: Any, least: int = 1) -> bool:
    """Return whether a value is a whole number from `least` to `LARGEST`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _is_positive(value: Any, most: float = _LARGEST_NUMBER) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value <= most


def check_fields(config: Mapping[str, Any]) -> None:
    """Refuse a config.json, as it is on disk, by the first number out of its range, also of rope parameters.

    A field may be absent or null, where its class says what that means.
    """
    parts = [config]
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(field), dict):  # of all layers, or one object for each kind
            parts += [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
    ranges = (
        (_SIZES, f"a whole number from 1 to {LARGEST}", is_size),
        (_COUNTS, f"a whole number from 0 to {LARGEST}", lambda value: is_size(value, 0)),
        (_POSITIVE, f"a positive number of at most {_LARGEST_NUMBER:g}", _is_positive),
        (_FACTORS, "a number from 0 to 1e30", lambda value: value == 0 or _is_positive(value)),
        (_SHARES, "a number above 0 and at most 1", lambda value: _is_positive(value, 1)),
    )
    for part, (names, wanted, is_right) in product(parts, ranges):
        for name in names:
            value = part.get(name)
            if value is not None and not is_right(value):
                raise _wrong(name, value, wanted)


def check_layers(config: Mapping[str, Any], *, mixers: bool) -> None:
    """Refuse a complete config in which `no_rope_layers` has not a 0 or 1 per layer, or no layer attends."""
    layers, turned = config["num_hidden_layers"], config.get("no_rope_layers")
    if turned is not None and not (
        isinstance(turned, list) and len(turned) == layers and all(value in (0, 1) for value in turned)
    ):
        raise _wrong("no_rope_layers", turned, f"a list of {layers} times 0 or 1, one per layer,")
    if mixers and ATTENTION not in config["layer_types"]:
        raise InvalidInput(
            f"config.json has no layer of the kind {ATTENTION}, so there is no KV cache to fold; correct "
            "layer_types"
        )


def known_ids(config: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Return the ids of the beginning and the end without those beyond the vocabulary.

    They are the defaults of a class whose vocabulary is larger.

    Returns:
        The fields that change. One whose ids are all beyond is None.
    """
    changed: dict[str, Any] = {}
    for field in ("bos_token_id", "eos_token_id"):
        stated = config.get(field)
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        known = [one for one in ids if isinstance(one, int) and one < vocabulary]
        if known != ids:
            changed[field] = known or None
    return changed


def former_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which transformers 4 and engines look for the rope parameters of a config.json.

    They are empty where it has none, says its scaling in those fields too, or rotates as they cannot say.
    """
    rope, windowed = config.get("rope_parameters"), {}
    if not isinstance(rope, dict) or config.get("rope_scaling"):
        return {}
    if isinstance(inner := rope.get("sliding_attention"), dict):
        field = WINDOWED_BASES.get(str(config.get("model_type")))
        rope = rope.get("full_attention")
        if field is None or not isinstance(rope, dict) or inner.get("rope_type", "default") != "default":
            return {}
        windowed = {field: inner.get("rope_theta")}
        if windowed.get("rope_theta", rope.get("rope_theta")) != rope.get("rope_theta"):
            return {}  # one field for two bases
    if rope.get("rope_theta") is None:
        return {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_scaled = rope.get("rope_type", "default") != "default"
    share = {key: value for key, value in rope.items() if key == "partial_rotary_factor"}
    former = {**share, "rope_theta": rope["rope_theta"], "rope_scaling": scaling if is_scaled else None}
    return {**windowed, **former}


def former_tokenizer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json of transformers 5 as both it and transformers 4 read it.

    transformers 4 has no TokenizersBackend, wants extra_special_tokens to be an object, and returns
    token_type_ids unless the file names its inputs.
    """
    made = dict(config)
    if made.get("tokenizer_class") == "TokenizersBackend":
        made["tokenizer_class"] = "PreTrainedTokenizerFast"
        made.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(made.get("extra_special_tokens"), list):
        made["additional_special_tokens"] = made.pop("extra_special_tokens")
    return made


def _wrong(path: str, value: Any, wanted: str) -> InvalidInput:
    return InvalidInput(f"config.json has {path} {shorten(value)}, where {wanted} is needed")
