"""Conditions of the rules: functions that say what of a written checkpoint breaks one, or nothing."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...convert.families.config_fields import WINDOWED_BASES, former_rope, former_tokenizer
from ...convert.families.recognition import configured, never_latent
from ...convert.families.rows import FAMILIES
from ...convert.formats.serving_widths import NARROW, NORM_EPSILON, SERVING
from ...core.errors import InvalidInput
from ...core.untrusted import read_json
from ...models.remote_code import AUTO_MAP, FILES
from .evidence import CLASSES, MULTIMODAL
from .expected_tensors import expected_tensors
from .rule_types import Written

# Widths of the cache that vLLM's latent attention takes, and (nope, rope, value) widths of a head on
# CUDA.
CACHED = (320, 512, 576)
_WIDE = (SERVING.latent, SERVING.rope)
_NARROW = (NARROW.latent, NARROW.rope)
_MLX_LAYERS = 61  # its loader takes every tensor below model.layers.61 for a further prediction head's
# mlx-lm's classes without sliding windows, which the sources of these families may have.
_LLAMAS = {"mixtral", "phi3", "starcoder2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
# engine -> classes that have no sliding windows there
_WHOLE = {"mlx": _LLAMAS | {"gemma2"}, "sglang": _LLAMAS | {"mistral"}}
# Of mlx-lm's classes: those that read rope_parameters; the bases of those whose own is not 10,000; and those
# that want a rope_theta.
_READS_ROPE = {"qwen3", "ministral3"}
_BASES = {
    "mixtral": 1e6, "qwen2": 1e6, "qwen2_moe": 1e6, "gpt_oss": 1.5e5, "cohere": 8e6, "cohere2": 5e4,
    "starcoder2": 1e5, "gemma3_text": 1e6,
}  # fmt: skip
_WANTS_THETA = {"qwen3_moe", "olmo3", "glm4", "granite", "stablelm"}
_PREFILL = (*((nope, SERVING.rope, value) for nope, value in SERVING.heads), (256, 0, 256))


def _when(holds: Callable[[Written], object], words: str) -> Callable[[Written], str]:
    """Return a condition that says the same words wherever it holds."""
    return lambda written: words if holds(written) else ""


unread_scheme = _when(lambda one: one.scheme == "modelopt", "its weights are quantised by ModelOpt")
linear = _when(
    lambda one: one.is_linear,
    "its latent is linearised by a small scale, which training and other tools' quantisers destroy",
)
halves = _when(
    lambda one: not one.get("rope_interleave", True),
    "its rotary pairs are halves apart (rope_interleave false)",
)
headless = _when(
    lambda one: "lm_head.weight" not in one.specs,
    "its head is tied to the embedding, so there is no lm_head.weight",
)
experts = _when(
    lambda one: not isinstance(one.config.get("n_routed_experts"), int), "its n_routed_experts is null"
)
all_rotary = _when(lambda one: not one.get("qk_nope_head_dim"), "its qk_nope_head_dim is 0")
named_rank = _when(lambda one: "kv_lora_rank" in one.config, "its config.json has kv_lora_rank")
narrow = _when(lambda one: one.cached == _NARROW, "what it caches is 256+64 wide")
expanded = _when(lambda one: one.get("new_decoder_architecture", False), "its class is Falcon's new decoder")
biased_falcon = _when(lambda one: falcon(one) and one.get("bias", False), "its class is Falcon with biases")
unnamed_activation = _when(
    lambda one: one.get("model_type", "") == "gemma2" and "hidden_act" not in one.config,
    "its config.json has no hidden_act",
)


def gaps(written: Written) -> str:
    """Find a tensor that config.json promises and the files lack, or hold in another shape."""
    wanted = expected_tensors(written.config, written.specs)
    missing = sorted(name for name in wanted if name not in written.specs)
    if missing:
        return f"there is no {missing[0]} ({len(missing)} such tensors)"
    for name in sorted(wanted):
        shape = wanted[name]
        if shape and written.specs[name].shape != shape:
            return f"{name} has shape {written.specs[name].shape}, not {shape}"
    return ""


def unheld(written: Written) -> str:
    """Find a source that kvfold's attention does not hold, which earlier versions folded nevertheless."""
    kind = written.config["kvfold"].get("source_model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        return ""
    reason = never_latent(configured(family, written.config))
    return "" if reason is None else f"it is a fold of {family.label}: {reason}"


def half(written: Written) -> str:
    """Find a float16 tensor next to a linear latent norm."""
    if not written.is_linear:
        return ""
    for name, spec in written.specs.items():
        if spec.dtype == torch.float16 and "self_attn" in name:
            return f"{name} is float16"
    return ""


def twins(written: Written) -> str:
    """Find a file of transformers 5 in which transformers 4 would read other rotary frequencies."""
    return _lost_rope(written, 1e6 if written.config.get("model_type") == "gemma3_text" else 1e4)


def lost_in_mlx(written: Written) -> str:
    """Find such a file in which the class of mlx-lm would."""
    kind = written.config.get("model_type")
    if kind in _READS_ROPE:
        return ""
    return _lost_rope(written, None if kind in _WANTS_THETA else _BASES.get(str(kind), 1e4))


def _lost_rope(written: Written, base: float | None) -> str:
    """Find settings that a reader of rope_theta and rope_scaling misses, whose own base is `base`."""
    new = written.config.get("rope_parameters")
    if isinstance(new, dict) and isinstance(new.get("sliding_attention"), dict):
        return _lost_tables(written, base)
    if not isinstance(new, dict) or new.get("rope_theta") is None:  # None: nothing rotates
        return ""
    is_scaled = new.get("rope_type", "default") != "default"
    is_partial = new.get("partial_rotary_factor", 1.0) != written.get("partial_rotary_factor", 1.0)
    if (
        written.get("rope_theta", base) != new["rope_theta"]
        or is_partial
        or (is_scaled and not written.config.get("rope_scaling"))
    ):
        return f"its rope_theta {new['rope_theta']:g} and scaling stand in rope_parameters only"
    return ""


def _lost_tables(written: Written, base: float | None) -> str:
    """Find such settings where rope_parameters has a table for each kind of layer."""
    if written.config.get("model_type") not in WINDOWED_BASES or written.config.get("rope_scaling"):
        return ""
    former = former_rope(written.config)
    if not former:
        return "its layers with a window have a base or scaling that only rope_parameters can say"
    own = {"rope_theta": base, "rope_local_base_freq": 1e4}
    lost = [name for name in former if written.get(name, own.get(name)) != former[name]]
    return f"its {', '.join(lost)} can be found in rope_parameters only" if lost else ""


def newer_tokenizer(written: Written) -> str:
    """Find a tokenizer_config.json that transformers 4 cannot read."""
    file = written.tokenizer and written.tokenizer / "tokenizer_config.json"
    if not file or not file.is_file():
        return ""
    try:
        config = read_json(file)
    except InvalidInput:
        return ""  # who loads the tokenizer says so
    if not isinstance(config, dict) or former_tokenizer(config) == config:
        return ""
    return "transformers 5 saved its tokenizer"


def code(written: Written) -> str:
    """Find a shipped file, or its name in auto_map, that is missing."""
    for name in FILES:
        if not (written.directory / name).is_file():
            return f"it lacks {name}"
    for name in AUTO_MAP:
        if name not in (written.config.get("auto_map") or {}):
            return f"its auto_map has no {name}"
    return ""


def epsilon(written: Written) -> str:
    """Find an epsilon that is not the linear norm's."""
    if not written.is_linear:  # a norm of numbers no smaller than the source's does not see its epsilon
        return ""
    epsilon = written.get("rms_norm_eps", NORM_EPSILON)
    return "" if epsilon == NORM_EPSILON else f"its rms_norm_eps is {epsilon}, not {NORM_EPSILON}"


def biases(written: Written) -> str:
    """Find a bias in the attention."""
    for name in written.specs:
        if ".self_attn." in name and name.endswith(".bias"):
            return f"its attention has biases, e.g. {name}"
    return ""


def rope(written: Written) -> str:
    """Find a rotary table that is neither the default nor YaRN's as DeepSeek-V3 itself has it."""
    kind = written.rope.get("rope_type", "default")
    if kind == "yarn" and "mscale_all_dim" in written.rope:
        return ""
    return "" if kind == "default" else f"its rope_type is {kind}"


def activation(written: Written) -> str:
    """Find an activation other than silu."""
    activation = written.get("hidden_act", "silu")
    return "" if activation == "silu" else f"its hidden_act is {activation}"


def norm(written: Written) -> str:
    """Find layers without the norm of the latent."""
    count = sum(name.endswith("kv_a_layernorm.weight") for name in written.specs)
    return "" if count >= written.get("num_hidden_layers") else "layers have no kv_a_layernorm.weight"


def width(written: Written) -> str:
    """Find a cache whose width vLLM's latent attention does not take."""
    latent, rope = written.cached
    return "" if latent + rope in CACHED else f"what it caches is {latent}+{rope} wide, not {SERVING}"


def unusual(written: Written) -> str:
    """Find a width that vLLM takes, but few of its kernels do."""
    return "" if width(written) else other(written)


def other(written: Written) -> str:
    """Find a cache that is not 512+64 wide."""
    if written.cached == _WIDE:
        return ""
    latent, rope = written.cached
    return f"what it caches is {latent}+{rope} wide, not {SERVING}"


def prefill(written: Written) -> str:
    """Find heads that no prefill kernel of vLLM's takes."""
    head = tuple(int(written.get(field)) for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if head in _PREFILL:
        return ""
    known = ", ".join("-".join(map(str, widths)) for widths in _PREFILL)
    return f"its heads are {'-'.join(map(str, head))} wide (nope-rope-value), not {known}"


def advertised(written: Written) -> str:
    """Find a head_dim that is not the width of the cache."""
    width = sum(written.cached)
    head = written.config.get("head_dim")
    return "" if head == width else f"its head_dim is {head}, not kv_lora_rank + qk_rope_head_dim = {width}"


def expert_groups(written: Written) -> str:
    """Find as many groups of experts as experts."""
    groups = written.get("n_group", 1)
    experts = written.get("n_routed_experts")
    return "" if groups < experts else f"its n_group {groups} is not below its n_routed_experts {experts}"


def whole_query(written: Written) -> str:
    """Find queries that are not compressed, in as many layers as llama.cpp wants them compressed."""
    if written.config.get("q_lora_rank"):
        return ""
    layers = written.get("num_hidden_layers")
    vocabulary = written.get("vocab_size")
    if layers in (26, 27) or (layers, vocabulary) == (48, 128256):
        return ""
    return f"it has {layers} layers and no q_lora_rank"


def others(written: Written) -> str:
    """Find layers without attention in an output with code of its own."""
    numbers = written.config["kvfold"].get("layers")
    return (
        "" if numbers is None else f"only {len(numbers)} of {written.get('num_hidden_layers')} layers attend"
    )


def limited(written: Written) -> str:
    """Find a sliding window, or bounded scores."""
    kinds = written.get("layer_types", None)
    used = "sliding_attention" in kinds if kinds else written.get("use_sliding_window", True)
    if used and 0 < written.get("sliding_window") < written.get("max_position_embeddings", 1):
        return f"its attention has a window of {written.get('sliding_window')} tokens"
    cap = written.get("attn_logit_softcapping", None)
    return "" if cap is None else f"its scores are bounded by {cap}"


def falcon_mlp(written: Written) -> str:
    """Find a Falcon whose MLP is not four times as wide as the residual stream."""
    width = written.get("ffn_hidden_size")
    hidden = written.get("hidden_size")
    if not expanded(written) or width in (0, 4 * hidden):
        return ""
    return f"its ffn_hidden_size is {width}, not {4 * hidden}"


def untold_kernel(written: Written) -> str:
    """Find a width that no CUDA kernel of llama.cpp's flash attention has."""
    return "" if written.cached in (_WIDE, _NARROW) else other(written)


# Conditions that ask for the widths of the cache alone: with the rules that always hold, they decide what an
# engine does with a kind of output.
OF_WIDTHS = (width, unusual, other, narrow, untold_kernel)


def deep(written: Written) -> str:
    """Find more layers than mlx-lm's loader keeps."""
    layers = written.get("num_hidden_layers")
    return f"it has {layers} layers" if layers > _MLX_LAYERS else ""


def unlisted(engine: str, *others: str) -> Callable[[Written], str]:
    """Return a condition: the engine has no class for the checkpoint's, and it is none of the others."""
    known = {*CLASSES[engine], *others}
    return lambda written: "" if written.get("model_type", "") in known else _class(written)


def untried(engine: str) -> Callable[[Written], str]:
    """Return a condition: the multimodal class was not run in the engine."""
    return lambda written: "" if written.config.get("model_type") in MULTIMODAL[engine] else _class(written)


def tried(engine: str) -> Callable[[Written], str]:
    """Return the opposite condition: the multimodal class was run in the engine."""
    return lambda written: "" if untried(engine)(written) else _class(written)


def windowed(engine: str) -> Callable[[Written], str]:
    """Return the condition that an engine's class has no sliding window, and the checkpoint one."""

    def found(written: Written) -> str:
        window = written.get("sliding_window")
        longest = written.get("max_position_embeddings", 1)
        used = written.get("use_sliding_window", True) and 0 < window < longest
        if not used or written.get("model_type", "") not in _WHOLE[engine]:
            return ""
        return f"its attention has a window of {window} tokens"

    return found


def falcon(written: Written) -> str:
    """Find a Falcon."""
    return _class(written) if written.get("model_type", "") == "falcon" else ""


def wide_mixtral(written: Written) -> str:
    """Find a Mixtral with heads of another width than the residual stream divided by their number."""
    heads, hidden = written.get("num_attention_heads"), written.get("hidden_size")
    width = written.get("head_dim")
    if written.get("model_type", "") != "mixtral" or width * heads in (0, hidden):
        return ""
    return f"its head_dim is {width}, not {hidden // heads}"


def _class(written: Written) -> str:
    names = written.get("architectures", None)
    is_named = isinstance(names, list) and names
    return f"its class is {names[0] if is_named else written.get('model_type', 'unknown')}"


def sentencepiece(written: Written) -> str:
    """Find a tokenizer that is not a byte-level BPE; a checkpoint without a readable one is not judged."""
    if written.tokenizer is None:
        return ""
    file = written.tokenizer / "tokenizer.json"
    if file.is_file():
        level = _is_byte_level(file, file.stat().st_mtime_ns)
        return "its tokenizer.json is no byte-level BPE" if level is False else ""
    has_pieces = (written.tokenizer / "tokenizer.model").is_file()
    return "its tokenizer is a SentencePiece model" if has_pieces else ""


@cache
def _is_byte_level(file: Path, _changed: int) -> bool | None:
    """Return whether a tokenizer.json holds a byte-level BPE; None where it is no tokenizer."""
    try:
        found = read_json(file)
    except InvalidInput:  # not a JSON object, or too large
        return None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, dict):
        return None
    return model.get("type") == "BPE" and "ByteLevel" in _types(found.get("pre_tokenizer"))


def _types(step: Any) -> set[str]:
    """Return the types of a step of a tokenizer and of the steps in it."""
    if not isinstance(step, dict):
        return set()
    inner = [_types(one) for one in step.get("pretokenizers") or ()]
    return {str(step.get("type"))}.union(*inner)
