"""Rules that say what each engine does with a written checkpoint, from config.json and the weights' headers.

Every rule carries its evidence: the command that was run, or the file of the engine's source that was read.
Engines drop, ignore or reinterpret fields without an error. A checkpoint that loads may therefore still print
nonsense.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ...core.cache_dtypes import cache_dtype
from . import evidence as seen
from . import rule_checks as check
from .engine_names import ENGINES
from .evidence import Evidence
from .output_kinds import CACHE_FORMATS, PAIRS, UNKNOWN
from .rule_types import Effect, LintFinding, Rule, Written, open_written

_STOCK = ("stock",)
_REMOTE = ("decoupled", "intact")
_GROUPED = ("grouped",)
_OWN = (*_GROUPED, "latent")  # the source's class
_EVERY = (*_STOCK, *_REMOTE, *_OWN)
_MULTIMODAL = ("multimodal", "multimodal stock")
_VLLM_RUN = {"vllm": seen.VLLM}
_VLLM_ALONE = {"vllm": seen.VLLM_BROKEN}  # the plugin lifts these rules


def _with_plugin(evidence: Evidence) -> dict[str, Evidence]:
    """Return the engines of a rule that the plugin leaves as it was seen in vLLM alone."""
    return {"vllm": evidence, "vllm+kvfold": seen.VLLM_PLUGIN_READ}


_VLLM_BROKEN = _with_plugin(seen.VLLM_BROKEN)
_HF_AND_VLLM = {"transformers": seen.HF, **_VLLM_BROKEN}
_VLLM_SGLANG = {**_with_plugin(seen.VLLM_READ), "sglang": seen.SGLANG_BROKEN}
_DROPPING = {**_VLLM_BROKEN, "sglang": seen.SGLANG_BROKEN, "llama.cpp": seen.LLAMA}
_NORMED = {**_DROPPING, "tgi": seen.TGI}  # the norm of the latent gets rms_norm_eps there
_NEAR = {**_VLLM_BROKEN, "llama.cpp": seen.LLAMA, "mlx": seen.MLX_READ, "tgi": seen.TGI}


def _rule(
    engines: Mapping[str, Evidence],
    layouts: tuple[str, ...],
    effect: Effect,
    condition: str,
    found: Callable[[Written], str],
    why: str,
) -> Rule:
    return Rule(engines=engines, layouts=layouts, effect=effect, condition=condition, found=found, why=why)


def _always(
    engines: Mapping[str, Evidence], layouts: tuple[str, ...], effect: Effect, words: str, why: str
) -> Rule:
    return _rule(engines, layouts, effect, "", lambda _: words, why)


_CODE = "it brings its own code"
_TRANSFORMERS = (
    _rule(_HF_AND_VLLM, _EVERY, "prints nonsense", "a tensor is missing or misshapen", check.gaps,
          "what is missing is left random, without an error"),
    _rule({"transformers": seen.HF_MODELOPT}, (*_EVERY, *_MULTIMODAL), "prints nonsense",
          "weights are quantised by ModelOpt", check.unread_scheme,
          "it has no reader: FP8 is loaded without its scales, NVFP4 refused; use another engine, or fold "
          "with --dequantize"),
    _rule(_HF_AND_VLLM, _STOCK, "prints nonsense", "a linear latent norm in float16", check.half,
          "a linearised latent is too small for float16; write bfloat16"),
    _rule(_HF_AND_VLLM, _STOCK, "note", "a linear latent norm", check.linear,
          "float16 cannot hold it; load it as bfloat16 or float32 (vllm serve --dtype bfloat16)"),
    _rule({"transformers": seen.HF, **_VLLM_SGLANG}, _STOCK, "refuses to load", "n_routed_experts is null",
          check.experts, "a number is needed even where no layer has experts"),
    _rule({"transformers": seen.HF4}, (*_STOCK, *_OWN), "note", "rotary settings of transformers 5 only",
          check.twins, "transformers 4 reads rope_theta and rope_scaling, and would rotate otherwise; "
                       "kvfold verify DIR --restore writes them where they can say it"),
    _rule({"transformers": seen.HF4}, (*_STOCK, *_OWN), "note", "a tokenizer of transformers 5",
          check.newer_tokenizer, "transformers 4 cannot load it; kvfold verify DIR --restore names a class "
                                 "that both load"),
    _always({"transformers": seen.HF4_STATIC}, _STOCK, "note", "it is latent attention",
            "a static cache (cache_implementation='static') fails in transformers 4.57; 5.15 has one"),
    _rule({"transformers": seen.HF}, _GROUPED, "saves no cache", "Falcon's new decoder", check.expanded,
          "it caches every query head's keys and values"),
    _rule({"transformers": seen.HF, **_VLLM_ALONE}, _REMOTE, "refuses to load",
          "a shipped file or its name is missing", check.code,
          "the code is looked up next to the weights"),
    _rule({"transformers": seen.HF}, _REMOTE, "prints nonsense", "a fold of Llama 4 by an earlier kvfold",
          check.unheld, "kvfold's attention computes something else, or ends with an error; use --to gqa"),
    _always({"transformers": seen.HF, **_VLLM_RUN}, _REMOTE, "note", _CODE,
            "load it, and its tokenizer, with trust_remote_code=True (vllm serve --trust-remote-code)"),
)  # fmt: skip
_SEVERAL = (
    _rule(_NORMED, _STOCK, "prints nonsense", "a linear latent norm, and rms_norm_eps is not 1e-6",
          check.epsilon, "the latent's norm, which is fitted to 1e-6, gets rms_norm_eps there"),
    _rule(_DROPPING, _STOCK, "prints nonsense", "attention has biases", check.biases,
          "biases of latent attention are dropped silently"),
    _rule(_DROPPING, _STOCK, "prints nonsense", "rope_type is not default", check.rope,
          "any rotary table but the default is read as YaRN, or lost"),
    _rule(_NEAR, _STOCK, "prints nonsense", "rope_interleave is false", check.halves,
          "pairs are taken as neighbours"),
    _rule({**_VLLM_SGLANG, "tgi": seen.TGI}, _STOCK, "refuses to load", "hidden_act is not silu",
          check.activation, "the class takes silu only"),
    _rule({"llama.cpp": seen.LLAMA, "mlx": seen.MLX_READ}, _STOCK, "prints nonsense",
          "hidden_act is not silu", check.activation, "silu is computed whatever it says"),
)  # fmt: skip
_VLLM = (
    _rule(_VLLM_BROKEN, _STOCK, "prints nonsense", "the head is tied", check.headless,
          "the head is left uninitialised, without an error"),
    _rule(_VLLM_BROKEN, _STOCK, "refuses to load", "kv_a_layernorm is missing", check.norm,
          "the norm of the latent has no default"),
    _rule(_VLLM_ALONE, ("stock", "decoupled"), "refuses to load",
          "what it caches is not 320, 512 or 576 wide", check.width,
          f"latent attention takes {check.CACHED[0]}, {check.CACHED[1]} or {check.CACHED[2]}; "
          f"VLLM_MLA_DISABLE=1 runs it with the full cache"),
    _rule(_VLLM_ALONE, ("stock", "decoupled"), "note", "what it caches is not 512+64 wide", check.unusual,
          "the CPU's decode kernel crashes on it (Unsupported block size); on an A100 and an H100 Triton "
          "takes it, FlashAttention-3 MLA and FlashMLA do not"),
    _rule({"vllm": seen.VLLM_PREFILL}, _STOCK, "refuses to load", "heads of other widths than the kernels'",
          check.prefill, "no CUDA prefill kernel takes others; VLLM_MLA_DISABLE=1 runs it with the full "
                         "cache"),
    _rule({"vllm+kvfold": seen.VLLM_PLUGIN_READ}, ("stock", "decoupled"), "note",
          "what it caches is not 512+64 wide", check.other,
          "the plugin serves it on a CPU; on a GPU it refuses caches of other than 320, 512 or 576 numbers"),
    _rule(_VLLM_ALONE, ("decoupled",), "refuses to load", "head_dim is not the width of the cache",
          check.advertised, "the cache is allocated by head_dim"),
    _rule(_with_plugin(seen.VLLM_BACKEND), _REMOTE, "refuses to load", "some layers do not attend",
          check.others, "its transformers backend takes no layer without attention"),
    _rule({"vllm": seen.VLLM_BACKEND}, ("decoupled",), "prints nonsense",
          "a sliding window, or bounded scores", check.limited,
          "its latent attention has neither; use --rope intact"),
    _rule({"vllm+kvfold": seen.VLLM_PLUGIN_BROKEN}, ("decoupled",), "refuses to load",
          "a sliding window, or bounded scores", check.limited,
          "its latent attention has neither; use --rope intact"),
    _rule(_VLLM_BROKEN, ("intact",), "prints nonsense", "config.json has kv_lora_rank", check.named_rank,
          "rotation and norms after the latent are passed over"),
    _always({"vllm": seen.VLLM, "vllm+kvfold": seen.VLLM_PLUGIN}, ("intact",), "saves no cache",
            "its keys are rotated after they are rebuilt", "the transformers backend caches them whole"),
    _rule(_VLLM_BROKEN, _GROUPED, "refuses to load", "Falcon with an MLP not four times as wide",
          check.falcon_mlp, "Falcon's MLP has four times the hidden size there"),
    _rule({"vllm": seen.VLLM_MULTIMODAL}, ("multimodal",), UNKNOWN,
          "another class than LLaVA, Mistral 3, Gemma 3, Qwen2.5-VL and Qwen3-VL", check.untried("vllm"),
          "its folds were not run there"),
    _rule({"vllm": seen.VLLM_MULTIMODAL}, ("multimodal",), "note", "one of these classes",
          check.tried("vllm"), "its folds were run there on text alone (vllm serve --language-model-only)"),
)  # fmt: skip
_SGLANG = (
    _rule({"sglang": seen.SGLANG_WIDTHS}, _STOCK, "note", "what it caches is not 512+64 wide", check.other,
          "Triton pads it to a power of two (--attention-backend triton); of the defaults, an H100's "
          "FlashAttention-3 wants a latent of 256 or more, and other fused kernels (trtllm_mla) want 512+64"),
    _always({"sglang": seen.SGLANG_BROKEN}, _REMOTE, "refuses to load", _CODE,
            "SGLang has no such class, and its transformers backend does not take this one"),
    _rule({"sglang": seen.SGLANG_BROKEN}, _GROUPED, "refuses to load", "the class is Falcon (GPT-NeoX)",
          check.falcon, "it has no such class, and its transformers backend refuses this one"),
    _rule({"sglang": seen.SGLANG_BROKEN}, _GROUPED, "refuses to load", "a Gemma 2 without hidden_act",
          check.unnamed_activation, "its class reads hidden_act, which Google's files have; give it the "
          "value of hidden_activation"),
    _rule({"sglang": seen.SGLANG_BROKEN}, _GROUPED, "refuses to load",
          "a Mixtral whose head_dim is not hidden_size / num_attention_heads", check.wide_mixtral,
          "its class computes head_dim so"),
    _rule({"sglang": seen.SGLANG_BROKEN}, _GROUPED, "note",
          "a sliding window that SGLang's class does not have", check.windowed("sglang"),
          "SGLang attends to all tokens, so past the window its answers differ, as of the source"),
    _rule({"sglang": seen.SGLANG_REGISTRY}, _GROUPED, "note", "a class that SGLang does not have",
          check.unlisted("sglang", "falcon"), "its transformers backend runs it"),
)  # fmt: skip
_LLAMA = (
    _always({"llama.cpp": seen.LLAMA_CLASSES}, _REMOTE, "refuses to load", _CODE,
            "the converter knows no such class"),
    _rule({"llama.cpp": seen.LLAMA}, _STOCK, "refuses to load",
          "no q_lora_rank, and not 26 or 27 layers (or 48 and a vocabulary of 128,256)", check.whole_query,
          "deepseek2 wants a compressed query unless it has 26 or 27 layers"),
    _rule({"llama.cpp": seen.LLAMA}, _STOCK, "refuses to load", "n_group is not below n_routed_experts",
          check.expert_groups, "the loader asserts fewer groups than experts"),
    _rule({"llama.cpp": seen.LLAMA}, _STOCK, "refuses to load", "qk_nope_head_dim is 0", check.all_rotary,
          "the loader asserts an un-rotated part"),
    _rule({"llama.cpp": seen.LLAMA}, _STOCK, "refuses to load", "the tokenizer is no byte-level BPE",
          check.sentencepiece, "the converter's deepseek2 takes byte-level BPE tokenizers only (BPE "
                               "pre-tokenizer was not recognized); use --to gqa"),
    _rule({"llama.cpp": seen.LLAMA_RUN}, _STOCK, "note", "a linear latent norm", check.linear,
          "F16 and quantised files lose it and print nonsense; write a BF16 GGUF, or --latent-norm fitted"),
    _rule({"llama.cpp": seen.LLAMA_CUDA}, _STOCK, "note", "what it caches is neither 512+64 nor 256+64 wide",
          check.untold_kernel, "CUDA's flash attention has no kernel for it; the CPU takes any width"),
    _rule({"llama.cpp": seen.LLAMA_RUN}, _GROUPED, "refuses to load", "Falcon with biases (GPT-NeoX)",
          check.biased_falcon, "the converter dies on the shape of the query's bias"),
    _rule({"llama.cpp": seen.LLAMA_CLASSES}, _GROUPED, "refuses to load",
          "a class that the converter does not have", check.unlisted("llama.cpp"),
          "the converter knows no such class"),
)  # fmt: skip
_MLX = (
    _always({"mlx": seen.MLX_BROKEN}, _REMOTE, "refuses to load", _CODE, "mlx-lm knows no such model_type"),
    _rule({"mlx": seen.MLX_BROKEN}, _STOCK, "refuses to load", "the head is tied", check.headless,
          "its class has a head of its own (Missing lm_head.weight)"),
    _rule({"mlx": seen.MLX_BROKEN}, _STOCK, "refuses to load", "rope_type is not default", check.rope,
          "longrope slots end in ZeroDivisionError there; use --engine mlx, which takes the default table"),
    _rule({"mlx": seen.MLX_CLASSES}, (*_STOCK, *_GROUPED), "prints nonsense",
          "rotary settings of transformers 5 only", check.lost_in_mlx,
          "most classes of mlx-lm take their own base then; kvfold verify DIR --restore writes the "
          "fields that they read"),
    _rule({"mlx": seen.MLX_READ}, _STOCK, "refuses to load", "more than 61 layers", check.deep,
          "its loader drops every tensor whose name begins with model.layers.61"),
    _rule({"mlx": seen.MLX_BROKEN}, _STOCK, "note", "a linear latent norm", check.linear,
          "load it in float32 or bfloat16; float16 and mlx_lm.convert -q lose it"),
    _rule({"mlx": seen.MLX_CLASSES}, _GROUPED, "refuses to load", "a class that mlx-lm does not have",
          check.unlisted("mlx"), "mlx-lm has no such class"),
    _rule({"mlx": seen.MLX_BROKEN}, _GROUPED, "note", "a sliding window that mlx-lm's class does not have",
          check.windowed("mlx"),
          "mlx-lm attends to all tokens, so past the window its answers differ, as of the source"),
)  # fmt: skip
_OTHERS = (
    _rule({"tensorrt-llm": seen.TENSORRT}, _GROUPED, UNKNOWN, "a class that is not in its index",
          check.unlisted("tensorrt-llm"), "its PyTorch backend has no such class; AutoDeploy was not read"),
    _rule({"tensorrt-llm": seen.TENSORRT_WIDTHS}, _STOCK, "refuses to load",
          "what it caches is neither 512+64 nor 256+64 wide", check.untold_kernel,
          "its PyTorch backend asserts 512+64, and AutoDeploy takes these two only"),
    _rule({"tensorrt-llm": seen.TENSORRT_WIDTHS}, _STOCK, "note", "what it caches is 256+64 wide",
          check.narrow, "AutoDeploy takes 256+64; its PyTorch backend asserts 512+64"),
    _rule({"tgi": seen.TGI}, _STOCK, "refuses to load", "the head is tied", check.headless,
          "its configuration refuses tie_word_embeddings"),
    _rule({"tgi": seen.TGI}, _STOCK, "refuses to load", "attention has biases", check.biases,
          "it looks for biases of q_b_proj and kv_b_proj too"),
    _always({"tgi": seen.TGI}, _STOCK, "saves no cache", "it is latent attention",
            "every head's keys and values are expanded, padded to one width and cached"),
)  # fmt: skip
RULES = (*_TRANSFORMERS, *_SEVERAL, *_VLLM, *_SGLANG, *_LLAMA, *_MLX, *_OTHERS)


def lint(directory: Path, engines: Iterable[str]) -> list[LintFinding]:
    """Apply the rules of some engines to a checkpoint, and return those that it breaks.

    Of its weights only the latent's norms are read.

    Raises:
        InvalidInput: there is no checkpoint that can be read.
    """
    return lint_written(open_written(directory), engines)


def lint_written(written: Written, engines: Iterable[str]) -> list[LintFinding]:
    """Apply the rules of some engines to an open or planned checkpoint; see `lint`."""
    found = []
    for engine in engines:
        if PAIRS[written.output, engine] is None:
            words = "kvfold has neither run such an output there nor read the engine's source for it"
            found.append(LintFinding(engine, UNKNOWN, words))
        for rule in RULES:
            if engine not in rule.engines or written.layout not in rule.layouts:
                continue
            words = rule.found(written)
            if words:
                found.append(LintFinding(engine, rule.effect, f"{words}; {rule.why}", rule.engines[engine]))
    return found


def format_findings(layout: str, engine: str, name: str) -> list[LintFinding]:
    """Return what an engine does with an output whose cache is to be in a number format.

    Args:
        layout: of `output_kinds.LAYOUTS`.
        engine: of ENGINES.
        name: of the format. In bfloat16 every engine that runs an output keeps its cache.

    Returns:
        A note for each kind of hardware that takes the format, or else one finding that none does, or that it
        is not known.

    Raises:
        InvalidInput: there is no such format.

    Example:
        >>> [finding.effect for finding in format_findings("stock", "vllm", "int4")]
        ['refuses to load']
    """
    assert engine in ENGINES
    cache_dtype(name)
    if name == "bfloat16":
        return []
    rows = [row for row in CACHE_FORMATS if row.engine == engine and layout in row.layouts]
    if not rows:
        words = f"kvfold has not read in which formats it stores such a cache; {name} is one of them or not"
        return [LintFinding(engine, UNKNOWN, words)]
    taking = [row for row in rows if name in row.takes]
    if not taking:
        known = sorted({known for row in rows for known in row.takes})
        instead = f"use {' or '.join(known)}" if known else "keep the cache in 16 bits"
        notes = "; ".join(row.note for row in rows if row.note)
        words = f"it does not store such a cache in {name}; {instead} ({notes})"
        return [LintFinding(engine, "refuses to load", words, rows[-1].evidence)]
    found = []
    for row in taking:
        where = "" if row.hardware == "any" else f" on a {row.hardware}"
        note = f"; {row.note}" if row.note else ""
        found.append(
            LintFinding(engine, "note", f"takes {name}{where}: {row.takes[name]}{note}", row.evidence)
        )
    return found
