"""Rules that say what each engine does with a written checkpoint, from config.json and the weights' headers.

Every rule names the version of the engine that it was learned on, and whether it was run there or read in the
source. Engines drop, ignore or reinterpret fields without an error. A checkpoint that loads may therefore
still print nonsense.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ...models.remote_code import AUTO_MAP, FILES
from ..formats.serving import NORM_EPSILON, SERVING
from .expected_tensors import expected_tensors
from .lint import Effect, LintFinding, Rule, Written, open_written

# Widths of the cache that vLLM's latent attention takes, and (nope, rope, value) widths of a head on
# CUDA.
_CACHED = (320, 512, 576)
_SERVED = (SERVING.latent, SERVING.rope)
_PREFILL = (*((nope, SERVING.rope, value) for nope, value in SERVING.heads), (256, 0, 256))


def _gaps(written: Written) -> str:
    wanted = expected_tensors(written.config, written.specs)
    missing = sorted(name for name in wanted if name not in written.specs)
    if missing:
        return f"there is no {missing[0]} ({len(missing)} such tensors)"
    for name in sorted(wanted):
        shape = wanted[name]
        if shape and written.specs[name].shape != shape:
            return f"{name} has shape {written.specs[name].shape}, not {shape}"
    return ""


def _half(written: Written) -> str:
    if not written.is_linear:
        return ""
    for name, spec in written.specs.items():
        if spec.dtype == torch.float16 and "self_attn" in name:
            return f"{name} is float16"
    return ""


def _twins(written: Written) -> str:
    """Find a file of transformers 5 in which transformers 4 would read other rotary frequencies."""
    new = written.config.get("rope_parameters")
    if not isinstance(new, dict) or "rope_theta" not in new:
        return ""
    other_theta = written.get("rope_theta", 1e4) != new["rope_theta"]
    is_scaled = new.get("rope_type", "default") != "default"
    if other_theta or (is_scaled and not written.config.get("rope_scaling")):
        return "its rotary settings stand in rope_parameters only"
    return ""


def _code(written: Written) -> str:
    for name in FILES:
        if not (written.directory / name).is_file():
            return f"it lacks {name}"
    for name in AUTO_MAP:
        if name not in (written.config.get("auto_map") or {}):
            return f"its auto_map has no {name}"
    return ""


def _linear(written: Written) -> str:
    return "its latent is linearised by a small scale" if written.is_linear else ""


def _epsilon(written: Written) -> str:
    if (
        not written.is_linear
    ):  # a norm of numbers that are no smaller than the source's does not see its epsilon
        return ""
    epsilon = written.get("rms_norm_eps", NORM_EPSILON)
    return "" if epsilon == NORM_EPSILON else f"its rms_norm_eps is {epsilon}, not {NORM_EPSILON}"


def _biases(written: Written) -> str:
    for name in written.specs:
        if ".self_attn." in name and name.endswith(".bias"):
            return f"its attention has biases, e.g. {name}"
    return ""


def _rope(written: Written) -> str:
    kind = written.rope.get("rope_type", "default")
    return "" if kind == "default" else f"its rope_type is {kind}"


def _halves(written: Written) -> str:
    if written.get("rope_interleave", True):
        return ""
    return "its rotary pairs are halves apart (rope_interleave false)"


def _activation(written: Written) -> str:
    activation = written.get("hidden_act", "silu")
    return "" if activation == "silu" else f"its hidden_act is {activation}"


def _headless(written: Written) -> str:
    if "lm_head.weight" in written.specs:
        return ""
    return "its head is tied to the embedding, so there is no lm_head.weight"


def _norm(written: Written) -> str:
    count = sum(name.endswith("kv_a_layernorm.weight") for name in written.specs)
    return "" if count >= written.get("num_hidden_layers") else "layers have no kv_a_layernorm.weight"


def _width(written: Written) -> str:
    latent, rope = written.cached
    return "" if latent + rope in _CACHED else f"what it caches is {latent}+{rope} wide, not 512+64"


def _unusual(written: Written) -> str:
    return "" if _width(written) else _other(written)


def _other(written: Written) -> str:
    if written.cached == _SERVED:
        return ""
    latent, rope = written.cached
    return f"what it caches is {latent}+{rope} wide, not 512+64"


def _prefill(written: Written) -> str:
    head = tuple(int(written.get(field)) for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if head in _PREFILL:
        return ""
    known = ", ".join("-".join(map(str, widths)) for widths in _PREFILL)
    return f"its heads are {'-'.join(map(str, head))} wide (nope-rope-value), not {known}"


def _advertised(written: Written) -> str:
    width = sum(written.cached)
    head = written.config.get("head_dim")
    return "" if head == width else f"its head_dim is {head}, not kv_lora_rank + qk_rope_head_dim = {width}"


def _experts(written: Written) -> str:
    return "" if isinstance(written.config.get("n_routed_experts"), int) else "its n_routed_experts is null"


def _expert_groups(written: Written) -> str:
    groups = written.get("n_group", 1)
    experts = written.get("n_routed_experts")
    return "" if groups < experts else f"its n_group {groups} is not below its n_routed_experts {experts}"


def _all_rotary(written: Written) -> str:
    return "" if written.get("qk_nope_head_dim") else "its qk_nope_head_dim is 0"


def _whole_query(written: Written) -> str:
    if written.config.get("q_lora_rank"):
        return ""
    layers = written.get("num_hidden_layers")
    vocabulary = written.get("vocab_size")
    if layers in (26, 27) or (layers, vocabulary) == (48, 128256):
        return ""
    return f"it has {layers} layers and no q_lora_rank"


def _named_rank(written: Written) -> str:
    return "its config.json has kv_lora_rank" if "kv_lora_rank" in written.config else ""


def _expanded(written: Written) -> str:
    return "its class is Falcon's new decoder" if written.get("new_decoder_architecture", False) else ""


def _falcon_mlp(written: Written) -> str:
    width = written.get("ffn_hidden_size")
    hidden = written.get("hidden_size")
    if not _expanded(written) or width in (0, 4 * hidden):
        return ""
    return f"its ffn_hidden_size is {width}, not {4 * hidden}"


def _always(words: str) -> Callable[[Written], str]:
    return lambda _: words


_HF, _HF4 = "transformers 5.23.0, run", "transformers 4.57.6, run"
_VLLM, _VLLM_READ = "vLLM 0.32.0, run", "vLLM 0.32.0, read"
_SGLANG, _LLAMA = "SGLang 0.5.23, read", "llama.cpp of November 2026, read"
_OTHERS = {"vllm": _VLLM, "sglang": _SGLANG, "llama.cpp": _LLAMA}
_STOCK = ("stock",)
_REMOTE = ("decoupled", "intact")
_EVERY = (*_STOCK, *_REMOTE, "grouped")


def _rule(
    engines: Mapping[str, str],
    layouts: tuple[str, ...],
    effect: Effect,
    found: Callable[[Written], str],
    why: str,
) -> Rule:
    return Rule(engines=engines, layouts=layouts, effect=effect, found=found, why=why)


RULES = (
    _rule({"transformers": _HF, "vllm": _VLLM}, _EVERY, "prints nonsense", _gaps,
          "what is missing is left random, without an error"),
    _rule({"transformers": _HF, "vllm": _VLLM}, _STOCK, "prints nonsense", _half,
          "a linearised latent is too small for float16; write bfloat16"),
    _rule({"transformers": _HF, "vllm": _VLLM}, _STOCK, "note", _linear,
          "float16 cannot hold it; load it as bfloat16 or float32 (vllm serve --dtype bfloat16)"),
    _rule({"transformers": _HF, "vllm": _VLLM_READ, "sglang": _SGLANG}, _STOCK, "refuses to load", _experts,
          "a number is needed even where no layer has experts"),
    _rule({"transformers": _HF4}, ("stock", "grouped"), "note", _twins,
          "transformers 4 reads rope_theta and rope_scaling, and would rotate otherwise"),
    _rule({"transformers": _HF}, ("grouped",), "saves no cache", _expanded, "it caches every query head's "
                                                                            "keys and values"),
    _rule({"transformers": _HF, "vllm": _VLLM}, _REMOTE, "refuses to load", _code,
          "the code is looked up next to the weights"),
    _rule({"transformers": _HF, "vllm": _VLLM}, _REMOTE, "note", _always("it brings its own code"),
          "load it with trust_remote_code=True (vllm serve --trust-remote-code)"),
    _rule(_OTHERS, _STOCK, "prints nonsense", _epsilon, "the latent's norm, which is fitted to 1e-6, gets "
                                                        "rms_norm_eps there"),
    _rule(_OTHERS, _STOCK, "prints nonsense", _biases, "biases of latent attention are dropped silently"),
    _rule(_OTHERS, _STOCK, "prints nonsense", _rope, "any rotary table but the default is read as YaRN, "
                                                     "or lost"),
    _rule({"vllm": _VLLM, "llama.cpp": _LLAMA}, _STOCK, "prints nonsense", _halves, "pairs are taken as "
                                                                                    "neighbours"),
    _rule({"vllm": _VLLM_READ, "sglang": _SGLANG}, _STOCK, "refuses to load", _activation,
          "the class takes silu only"),
    _rule({"llama.cpp": _LLAMA}, _STOCK, "prints nonsense", _activation, "silu is computed whatever it says"),
    _rule({"vllm": _VLLM}, _STOCK, "prints nonsense", _headless, "the head is left uninitialised, without "
                                                                 "an error"),
    _rule({"vllm": _VLLM}, _STOCK, "refuses to load", _norm, "the norm of the latent has no default"),
    _rule({"vllm": _VLLM}, ("stock", "decoupled"), "refuses to load", _width,
          f"latent attention takes {_CACHED[0]}, {_CACHED[1]} or {_CACHED[2]}; VLLM_MLA_DISABLE=1 runs it "
          f"with the full cache"),
    _rule({"vllm": _VLLM}, ("stock", "decoupled"), "note", _unusual, "CPU kernels crash on it, and few "
                                                                     "others take it"),
    _rule({"vllm": _VLLM_READ}, _STOCK, "refuses to load", _prefill,
          "no CUDA prefill kernel takes others; VLLM_MLA_DISABLE=1 runs it with the full cache"),
    _rule({"vllm": _VLLM}, ("decoupled",), "refuses to load", _advertised, "the cache is allocated by "
                                                                           "head_dim"),
    _rule({"vllm": _VLLM}, ("intact",), "prints nonsense", _named_rank, "rotation and norms after the "
                                                                        "latent are passed over"),
    _rule({"vllm": _VLLM}, ("intact",), "saves no cache", _always("its keys are rotated after they are "
                                                                  "rebuilt"),
          "the transformers backend caches them whole"),
    _rule({"vllm": _VLLM}, ("grouped",), "refuses to load", _falcon_mlp, "Falcon's MLP has four times the "
                                                                         "hidden size there"),
    _rule({"sglang": _SGLANG}, _STOCK, "note", _other, "some fused kernels (trtllm_mla) take 512+64 only"),
    _rule({"sglang": _SGLANG}, _REMOTE, "saves no cache", _always("it brings its own code"),
          "the transformers backend knows no latent attention"),
    _rule({"llama.cpp": _LLAMA}, _REMOTE, "refuses to load", _always("it brings its own code"),
          "the converter knows no such class"),
    _rule({"llama.cpp": _LLAMA}, _STOCK, "refuses to load", _whole_query,
          "deepseek2 wants a compressed query unless it has 26 or 27 layers"),
    _rule({"llama.cpp": _LLAMA}, _STOCK, "refuses to load", _expert_groups, "the loader asserts fewer "
                                                                            "groups than experts"),
    _rule({"llama.cpp": _LLAMA}, _STOCK, "refuses to load", _all_rotary,
          "the loader asserts an un-rotated part"),
    _rule({"llama.cpp": _LLAMA}, _STOCK, "note", _linear,
          "F16 and K-quants would lose it (not run); write a bf16 GGUF"),
)  # fmt: skip


def lint(directory: Path, engines: Iterable[str]) -> list[LintFinding]:
    """Apply the rules of some engines to a checkpoint, and return those that it breaks.

    Args:
        directory: the checkpoint; of its weights only the latent's norms are read.
        engines: of engines.ENGINES.

    Raises:
        InvalidInput: there is no checkpoint that can be read.
    """
    return lint_written(open_written(directory), engines)


def lint_written(written: Written, engines: Iterable[str]) -> list[LintFinding]:
    """Apply the rules of some engines to an open or planned checkpoint; see `lint`."""
    found = []
    for engine in engines:
        for rule in RULES:
            if engine not in rule.engines or written.layout not in rule.layouts:
                continue
            words = rule.found(written)
            if words:
                found.append(LintFinding(engine, rule.effect, f"{words}; {rule.why}", rule.engines[engine]))
    return found
