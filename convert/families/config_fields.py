"""Fields of config.json that kvfold or its outputs' classes read, each with the range of its values.

transformers' configuration classes check the types of the fields that they declare (loaded_config.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...core.errors import InvalidInput
from ...core.untrusted import printable, shorten
from .layers.layer_kinds import ATTENTION

LARGEST = 2**31 - 1  # of sizes, positions and ids
_LARGEST_NUMBER = 1e30  # float32 has three times 10^38, and holds its products with a position
_ROPE = ("rope_parameters", "rope_scaling")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST_NUMBER and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def is_size(value: Any) -> bool:
    """Return whether a value is a whole number from 1 to `LARGEST`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _are_objects(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values())


_Check = tuple[str, Callable[[Any], bool]]  # the words for the values that are right, and the test
_SIZE: _Check = (f"a whole number from 1 to {LARGEST}", is_size)
_POSITIVE: _Check = (f"a positive number of at most {_LARGEST_NUMBER:g}", _is_positive)
_COUNT: _Check = (f"a whole number from 0 to {LARGEST}", lambda value: value == 0 or is_size(value))
_NUMBER: _Check = (f"a number from -{_LARGEST_NUMBER:g} to {_LARGEST_NUMBER:g}", _is_number)
_SHARE: _Check = ("a number above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_TEXT: _Check = ("a string", lambda value: isinstance(value, str))
_NAMES: _Check = ("a list of strings", _list_of(lambda value: isinstance(value, str)))

# A field may also be absent or null, where its class says what that means.
_FIELDS: dict[str, _Check] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size"), _SIZE),
    **dict.fromkeys(("head_dim", "intermediate_size"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads"), _SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_inner", "ffn_dim"), _SIZE),
    **dict.fromkeys(("ffn_hidden_size", "moe_intermediate_size", "num_local_experts"), _SIZE),
    **dict.fromkeys(("num_experts_per_tok", "original_max_position_embeddings"), _SIZE),
    **dict.fromkeys(("attention_chunk_size", "no_rope_layer_interval", "full_attention_interval"), _SIZE),
    **dict.fromkeys(("attn_layer_period", "prefix_dense_sliding_window_pattern"), _SIZE),
    **dict.fromkeys(("attn_layer_offset", "first_k_dense_replace", "sliding_window", "rotary_dim"), _COUNT),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), _POSITIVE),
    **dict.fromkeys(("norm_eps", "attn_logit_softcapping", "query_pre_attn_scalar"), _POSITIVE),
    **dict.fromkeys(("attention_multiplier", "logits_scaling", "swiglu_limit"), _POSITIVE),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), _POSITIVE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), _NUMBER),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), _NAMES),
    "per_layer_config": ("an object of objects, one for each layer,", _are_objects),
}
# Of a multimodal config.json, next to its text_config: tokens in whose place other inputs stand.
_PLACES: dict[str, _Check] = {
    **dict.fromkeys(
        (
            *("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "boi_token_index"),
            *("eoi_token_index", "vision_token_id", "vision_start_token_id", "vision_end_token_id"),
        ),
        ("a token id", lambda value: value == 0 or is_size(value)),
    ),
    "architectures": _NAMES,
}
_ROPE_FIELDS: dict[str, _Check] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "alpha"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), _NUMBER),
    "original_max_position_embeddings": _SIZE,
    "partial_rotary_factor": _SHARE,
    **dict.fromkeys(
        ("short_factor", "long_factor"),
        (f"a list of positive numbers of at most {_LARGEST_NUMBER:g}", _list_of(_is_positive)),
    ),
}
_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}  # which may have rope parameters of their own
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_fields(config: Mapping[str, Any]) -> None:
    """Refuse a config.json, as it is on disk, by the first field whose value is wrong."""
    _check_table(config, _FIELDS, "")
    for field in _ROPE:
        for path, rope in _rope_objects(config.get(field), field):
            _check_table(rope, _ROPE_FIELDS, f"{path}.")
            low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
            if low is not None and high is not None and low >= high:
                raise _wrong(f"{path}.low_freq_factor", low, f"a number below high_freq_factor {high}")


def check_places(config: Mapping[str, Any]) -> None:
    """Refuse a multimodal config.json by a wrong value that is not the text model's, or name of a class."""
    _check_table(config, _PLACES, "")
    if isinstance(text := config.get("text_config"), dict):
        _check_table(text, {"architectures": _NAMES}, "text_config.")


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


def check_ids(config: Mapping[str, Any], vocabulary: int) -> None:
    """Check the token ids in a config.json.

    Ids of the beginning and the end may be beyond the vocabulary: they are the defaults of a class whose
    vocabulary is larger, and `known_ids` leaves them out. Transformers cannot load such an id of padding.
    """
    for field in _IDS:
        # -1 stands for no padding in checkpoints of the first Llama.
        least, most = (-1, vocabulary - 1) if field == "pad_token_id" else (0, LARGEST)
        for one in _ids_of(config, field):
            if one is not None and not least <= one <= most:
                raise _wrong(field, config[field], f"a token id from 0 to {vocabulary - 1}")


def known_ids(config: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Return the ids of the beginning and the end without those beyond the vocabulary.

    Returns:
        The fields that change. One whose ids are all beyond is None.
    """
    changed: dict[str, Any] = {}
    for field in ("bos_token_id", "eos_token_id"):
        ids = [one for one in _ids_of(config, field) if one is not None]
        known = [one for one in ids if one < vocabulary]
        if known != ids:
            changed[field] = known or None
    return changed


def former_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which transformers 4 and engines look for the rope parameters of a config.json.

    They are empty where it has none, has one set for each kind of layer, or says them in those fields too.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_theta") is None or config.get("rope_scaling"):
        return {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_scaled = rope.get("rope_type", "default") != "default"
    share = {key: value for key, value in rope.items() if key == "partial_rotary_factor"}
    return {**share, "rope_theta": rope["rope_theta"], "rope_scaling": scaling if is_scaled else None}


def _ids_of(config: Mapping[str, Any], field: str) -> list[Any]:
    value = config.get(field)
    return value if field == "eos_token_id" and isinstance(value, list) else [value]


def _check_table(values: Mapping[str, Any], table: Mapping[str, _Check], path: str) -> None:
    for field, (wanted, is_right) in table.items():
        value = values.get(field)
        if value is not None and not is_right(value):
            raise _wrong(path + field, value, wanted)


def _rope_objects(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rope parameters in a field, by their path: one object, or one for each kind of layer."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    if any(isinstance(inner, dict) for inner in value.values()) or _KINDS_OF_LAYERS & value.keys():
        for kind, inner in value.items():
            if not isinstance(inner, dict):
                raise _wrong(f"{path}.{printable(kind)}", inner, "an object, one for each kind of layer,")
            yield f"{path}.{printable(kind)}", inner
    else:
        yield path, value


def _wrong(path: str, value: Any, wanted: str) -> InvalidInput:
    return InvalidInput(f"config.json has {path} {shorten(value)}, where {wanted} is needed")
