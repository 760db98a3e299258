"""The family of a checkpoint, the meaning of its config.json, and obstacles to a latent cache.

`family_of`, `is_multimodal` and `complete` read a config.json as it is on disk; the other functions read what
`complete` returns. Defaults, names and corrections of config.json are those of transformers' configuration
class; only its module is imported, and not before it is asked for.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.errors import InvalidInput
from ...core.untrusted import printable, shorten
from ..algebra.target import Geometry, LatentGeometry
from .config_fields import check_fields
from .family import Family
from .layers.layer_kinds import ATTENTION, SLIDING
from .layers.layer_shapes import first_follower, overrides
from .rows import FAMILIES
from .unfolded import CODE_ONLY, UNFOLDED

# Model types of towers that compute, on text, what another model type computes. Sections of M-RoPE have the
# same position on text, and one table of frequencies.
_SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
BEHIND_ROTATION = "it normalises queries and keys after rotation"
UNLIKE = "its layers differ in the width of their heads"
_SEE = "see `kvfold families` for those that kvfold folds"


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a checkpoint.

    Raises:
        InvalidInput: an encoder, latent attention already, another head than a language model's, a family
            that kvfold does not know, or a variant of one that it does not fold.
    """
    kind = config.get("model_type")
    if kind is None:
        raise InvalidInput(f"config.json has no model_type; {_SEE}")
    if not isinstance(kind, str):
        raise InvalidInput(f"config.json has model_type {shorten(kind)}, where a string is needed")
    if config.get("is_encoder_decoder") and kind not in UNFOLDED:
        raise InvalidInput(
            f"model_type {shorten(kind)} is an encoder-decoder model, and kvfold folds decoders; {_SEE}"
        )
    if is_multimodal(config):
        raise InvalidInput(
            f"model_type {kind} is a multimodal model, which `kvfold convert` and `kvfold plan` take whole; "
            "to distil, migrate or quantise it, write its text tower alone with `kvfold convert --text-only`"
        )
    if kind in UNFOLDED:
        raise InvalidInput(f"model_type {kind} cannot be folded: {UNFOLDED[kind]}; {_SEE}")
    if kind in CODE_ONLY:
        raise InvalidInput(
            f"model_type {kind} exists only as code of its checkpoints, which kvfold does not run: "
            f"{CODE_ONLY[kind]}"
        )
    if kind not in FAMILIES and "text_config" in config:
        raise InvalidInput(
            f"model_type {kind} has a text_config, but no vision_config or audio_config; kvfold folds the "
            "text tower of a model that has one of them, so correct config.json, or name another checkpoint"
        )
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, FAMILIES, n=1)
        meant = f"did you mean {near[0]!r}? Otherwise " if near else ""
        raise InvalidInput(f"model_type {shorten(kind)} is unknown; {meant}{_SEE}")
    family = FAMILIES[kind]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise InvalidInput(
            f"config.json has architectures {architectures}; kvfold folds causal language models: "
            f"{family.architecture}"
        )
    for field, allowed in family.needs.items():
        value = config[field] if field in config else default_of(family, field)
        if value not in allowed:
            raise InvalidInput(
                f"config.json has {field} {value!r}; kvfold folds {family.label} where it is {allowed[-1]}"
                f"{family.because}"
            )
    return configured(family, config)


def configured(family: Family, config: Mapping[str, Any]) -> Family:
    """Return a family's row without the norms and rotation that config.json, complete or not, turns off.

    Where it bounds queries, keys and values, the row has no output format of latent attention.
    """
    flag = family.norm_flag
    if flag is not None and not (config[flag] if flag in config else default_of(family, flag)):
        family = replace(family, q_norm=None, k_norm=None, norm_spans="head", late_norms=None)
    if family.latent:
        compressed = config["q_lora_rank"] if "q_lora_rank" in config else default_of(family, "q_lora_rank")
        family = replace(family, q=f"layers.{{layer}}.self_attn.{'q_b_proj' if compressed else 'q_proj'}")
        if config.get("rope_interleave") is False:
            family = replace(family, rotary="half")
    bound = None if family.clip is None else config.get(family.clip)
    if bound is not None:
        family = replace(family, unlatent=f"{family.clip} {bound} bounds its queries, keys and values")
    return family if _rotates(family, config) else replace(family, rotary=None)


def as_causal(named: str) -> str:
    """Return the model type of the causal language model that computes what a text tower computes.

    Example:
        >>> as_causal("qwen2_5_vl_text"), as_causal("gemma3_text")
        ('qwen2', 'gemma3_text')
    """
    return _SAME_AS.get(named, named)


def _rotates(family: Family, config: Mapping[str, Any]) -> bool:
    """Return whether some layer rotates; true where only a complete config.json would say."""
    if family.rotates == "position_embedding_type":
        return config.get(family.rotates) == "rope"
    if family.rotates == "rope_theta":
        rope = config.get("rope_parameters")
        return not (isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None)
    kinds = config.get("layer_types" if family.unrotated == "sliding_window" else str(family.unrotated))
    if not isinstance(kinds, list) or len(kinds) != config.get("num_hidden_layers"):
        return True
    return any(rotated(family, config, layer) for layer in range(len(kinds)))


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model that reads more than text."""
    kind = config.get("model_type")
    if not any(key in config for key in ("vision_config", "audio_config")):
        return False
    return not isinstance(kind, str) or kind not in FAMILIES


def complete(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as transformers' class of the family loads it, with its defaults filled in.

    Its fields have the names that Llama's have, `rope_parameters` says how layers rotate, and `layer_types`
    the kind of every layer, where there is more than one.
    """
    check_fields(config)
    whole = loaded_config(family, config)
    layers = whole["num_hidden_layers"]
    if family.kv_heads is None:
        whole["num_key_value_heads"] = whole["num_attention_heads"]
    rope = whole.get("rope_parameters") or {}
    if family.stretches and rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        width = whole.get("head_dim") or whole["hidden_size"] // whole["num_attention_heads"]
        base = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        whole["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    if family.mixers and not whole.get("layer_types"):
        whole["layer_types"] = [ATTENTION] * layers
    if family.unlike:
        whole["layer_types"] = [*whole["layer_types"][:-1], ATTENTION]  # as the class has it
        whole["per_layer_config"] = overrides(whole, layers)
    return whole


def attending(family: Family, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the layers that attend, from a complete config whose lists were checked.

    Those that read another layer's keys and values do not count: they have no cache.
    """
    layers = range(config["num_hidden_layers"])
    if not family.mixers:
        return tuple(layers[: first_follower(family, config)])
    return tuple(layer for layer in layers if config["layer_types"][layer] == ATTENTION)


def geometry_of(config: Mapping[str, Any]) -> Geometry:
    """Return the attention shape that a complete config states."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.latent:
        return LatentGeometry(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=1,
            head_dim=config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            kv_lora_rank=config["kv_lora_rank"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
        )
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise InvalidInput(
            f"config.json is inconsistent: {heads} query heads do not share {kv_heads} key/value heads evenly"
        )
    if head_dim % 2:
        raise InvalidInput(f"config.json has head_dim {head_dim}; rotary heads need an even one")
    return Geometry(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )


def rotary_width(family: Family, config: Mapping[str, Any], head_dim: int) -> int:
    """Return how many of a head's dimensions rotate; these are the first ones.

    Raises:
        InvalidInput: an odd number, more than there are, or a part where the class rotates whole heads.
    """
    if family.rotary is None:
        return 0
    if family.latent:
        return int(config["qk_rope_head_dim"])
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    if share not in {None, 1.0} and not family.rotates_partly:
        raise InvalidInput(
            f"config.json has partial_rotary_factor {share}, but {family.architecture} of transformers "
            "rotates whole heads; leave it out"
        )
    width = config.get("rotary_dim") or int(head_dim * (share or 1.0))
    if width % 2 or not 0 <= width <= head_dim:
        raise InvalidInput(
            f"config.json has {width} rotary dimensions; it needs an even number of at most {head_dim}"
        )
    return int(width)


def rotated(family: Family, config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer rotates its queries and keys."""
    if family.unrotated == "sliding_window":
        kinds = config.get("layer_types")
        return config.get("sliding_window") is None or not kinds or kinds[layer] == SLIDING
    blocks = config.get("mlp_layer_types") or []
    if (
        family.dense_rotate
        and config.get(family.dense_rotate, 1) == 1
        and blocks[layer : layer + 1] == ["dense"]
    ):
        return True
    return family.unrotated is None or config[family.unrotated][layer] in (1, SLIDING)


def latent_obstacle(config: Mapping[str, Any], *, regressed: bool) -> str | None:
    """Return why the stock latent class cannot hold a checkpoint, and a way out; None when it can.

    Args:
        config: a complete one.
        regressed: key norms are no obstacle, because linear functions stand for them.
    """
    family = configured(FAMILIES[config["model_type"]], config)
    if regressed:
        family = replace(family, q_norm=None, k_norm=None)
    for reason in stock_reasons(family):
        return f"the stock MLA class cannot hold {family.label}: {reason}; use --to gqa or --to mqa"
    window = config.get("sliding_window")
    positions = config["max_position_embeddings"]
    if (
        window
        and config.get("use_sliding_window", True)
        and (not isinstance(window, int) or window < positions)
    ):
        return (
            f"sliding_window {window!r} is shorter than max_position_embeddings {positions}, and no stock "
            "MLA class has a window; use --to gqa, or set max_position_embeddings to the window if longer "
            "inputs are not needed"
        )
    if config.get("mlp_bias"):
        return "mlp_bias is true, and the stock MLA class has no MLP biases; use --to gqa"
    if not any(rotated(family, config, layer) for layer in attending(family, config)):
        return (
            f"{family.unrotated} turns rotation off in every layer, and the stock MLA class has rotary "
            f"slots; use --to gqa"
        )
    return None


def intact_reason(family: Family, *, biased: bool, unlike: bool) -> str | None:
    """Return why the rotary part of a family's keys cannot be decoupled; None when it can."""
    if family.sinks is not None and biased:
        return "its attention has sinks, so that biases of keys and values are no constants"
    return "its layers have unlike rotary embeddings" if unlike else None


def never_latent(family: Family) -> str | None:
    """Return why no output format of latent attention holds a checkpoint; None where one may."""
    if family.late_norms is not None:
        return BEHIND_ROTATION
    return UNLIKE if family.unlike else family.unlatent


def stock_reasons(family: Family) -> list[str]:
    """Return why the stock latent class can hold no checkpoint of a family; empty when it can."""
    never = never_latent(family)
    properties = {
        "it normalises its keys after the projection": family.k_norm is not None,
        "it bounds its attention scores": family.soft_cap is not None,
        "its attention has sinks": family.sinks is not None,
        "some of its layers do not attend": family.mixers,
        "it gates each head's output": family.gate is not None,
    }
    reasons = [] if never is None else [never]
    reasons += [reason for reason, holds in properties.items() if holds]
    return reasons + ([family.block] if isinstance(family.block, str) else [])


# Fields that the class moves into rope_parameters, or does not read.
_MOVED = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
_FORMER = {"attention": "full_attention", "mamba": "linear_attention"}  # kinds of layers by transformers 4


def _class_of(family: Family) -> Any:
    import transformers

    if family.kind not in transformers.CONFIG_MAPPING:
        raise InvalidInput(
            f"transformers {transformers.__version__} has no class of {family.label} (model_type "
            f"{family.kind}); install a newer one"
        )
    return transformers.CONFIG_MAPPING[family.kind]


def default_of(family: Family, field: str) -> Any:
    """Return the value of a field that config.json leaves out; None for one that the class does not have."""
    return getattr(_class_of(family), field, None)


def loaded_config(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration that the class makes of a config.json, next to its others."""
    from huggingface_hub.errors import StrictDataclassError

    from ...models.load_failures import no_warnings

    refusals = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    kind = _class_of(family)
    stated = {field: value for field, value in config.items() if field != "model_type"}

    def with_infinities(found: dict[str, Any]) -> Any:  # which transformers writes as objects
        return float(found["__float__"]) if found.keys() == {"__float__"} else found

    try:
        with no_warnings():
            # A copy, because the class changes objects in it.
            made = kind.from_dict(json.loads(json.dumps(stated), object_hook=with_infinities))
    except refusals as error:
        reason = printable(" ".join(str(error).rpartition("Error: ")[2].split()))
        raise InvalidInput(f"{kind.__name__} of transformers cannot read config.json: {reason}") from error
    fields = {field: value for field, value in vars(made).items() if field[0] != "_" and field != "dtype"}
    whole = {field: value for field, value in config.items() if field not in _MOVED} | fields
    names = {**kind.attribute_map, **family.names}
    whole |= {ours: getattr(made, theirs) for ours, theirs in names.items() if hasattr(made, theirs)}
    kinds = getattr(made, "layer_types", None) or getattr(made, "layers_block_type", None)
    return whole | ({} if kinds is None else {"layer_types": [_FORMER.get(each, each) for each in kinds]})
