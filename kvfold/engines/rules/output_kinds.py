"""Kinds of outputs, and what is known of each in each engine: evidence, kernels, formats of the cache."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from ...convert.formats.serving_widths import PROFILES
from . import evidence as seen
from .engine_names import ENGINES
from .evidence import Evidence, read

UNKNOWN: Final = "not known"
OTHER_WIDTHS: Final = "other widths"
_SERVED = {(profile.latent, profile.rope): str(profile) for profile in PROFILES}
_BY_WIDTHS = ("stock", "decoupled")  # layouts that engines run in some widths and not in others

# The layouts of outputs, as `Written.layout`.
LAYOUTS = {
    "grouped": "GQA, MQA",
    "stock": "MLA stock",
    "latent": "MLA in another class that has it",
    "decoupled": "MLA remote",
    "intact": "MLA remote, rope intact",
    "multimodal": "GQA, MQA in a multimodal class",
    "multimodal stock": "MLA stock in a multimodal class",
}


class Output(NamedTuple):
    """A kind of output.

    Attributes:
        label: for tables.
        layout: of LAYOUTS.
        cached: widths of the latent and the rotary key of an example; zeros where no rule reads them.
    """

    label: str
    layout: str
    cached: tuple[int, int] = (0, 0)


def output_of(layout: str, cached: tuple[int, int]) -> str:
    """Return the kind of an output, a key of OUTPUTS.

    `cached` are the widths of the latent and of the rotary key.
    """
    if layout not in _BY_WIDTHS:
        return layout
    return f"{layout} {_SERVED.get(cached, OTHER_WIDTHS)}"


def _outputs() -> dict[str, Output]:
    """Return every kind of output by its key, in the order of tables."""
    found = {}
    for layout, label in LAYOUTS.items():
        if layout not in _BY_WIDTHS:
            found[layout] = Output(label, layout)
            continue
        for cached, widths in {**_SERVED, (48, 16): OTHER_WIDTHS}.items():
            found[output_of(layout, cached)] = Output(f"{label}, {widths}", layout, cached)
    return found


OUTPUTS = _outputs()
# For each kind of output the evidence that the rules for it rest on, by engine in the order of ENGINES;
# None: not known.
_EVIDENCE: dict[str, tuple[Evidence | None, ...]] = {
    "grouped": (
        seen.HF, seen.VLLM, seen.VLLM_PLUGIN, seen.SGLANG, seen.LLAMA_RUN, seen.MLX, seen.TENSORRT, None,
    ),
    "stock 512+64": (
        seen.HF, seen.VLLM, seen.VLLM_PLUGIN, seen.SGLANG_LATENT, seen.LLAMA_RUN, seen.MLX, seen.TENSORRT,
        seen.TGI,
    ),
    "stock 256+64": (
        seen.HF, seen.VLLM_WIDTHS, seen.VLLM_PLUGIN, seen.SGLANG_LATENT, seen.LLAMA_RUN, seen.MLX,
        seen.TENSORRT_WIDTHS, seen.TGI,
    ),
    "stock other widths": (
        seen.HF, seen.VLLM_BROKEN, seen.VLLM_PLUGIN, seen.SGLANG_LATENT, seen.LLAMA_WIDTHS, seen.MLX,
        seen.TENSORRT_WIDTHS, seen.TGI,
    ),
    "latent": (seen.HF_LATENT, *7 * (None,)),
    "decoupled 512+64": (
        seen.HF, seen.VLLM, seen.VLLM_PLUGIN, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN, None,
        None,
    ),
    "decoupled 256+64": (
        seen.HF, seen.VLLM_WIDTHS, seen.VLLM_PLUGIN, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN,
        None, None,
    ),
    "decoupled other widths": (
        seen.HF, seen.VLLM_BROKEN, seen.VLLM_PLUGIN, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN,
        None, None,
    ),
    "intact": (
        seen.HF, seen.VLLM, seen.VLLM_PLUGIN, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN, None,
        None,
    ),
    "multimodal": (seen.HF_MULTIMODAL, seen.VLLM_MULTIMODAL, *6 * (None,)),
    "multimodal stock": (seen.HF_MULTIMODAL, *7 * (None,)),
}  # fmt: skip
PAIRS: dict[tuple[str, str], Evidence | None] = {
    (output, engine): found
    for output, row in _EVIDENCE.items()
    for engine, found in zip(ENGINES, row, strict=True)
}
_ANY_WIDTH = "any width"
_YARN_ALONE = "none: rotary tables but YaRN's are refused"


class Kernels(NamedTuple):
    """The kernels of one engine on one kind of hardware, for latents of two widths.

    Attributes:
        engine, hardware: where.
        wide, narrow: kernels for 512+64 and for 256+64, in words.
        evidence: where it was read, or the command that was run.
    """

    engine: str
    hardware: str
    wide: str
    narrow: str
    evidence: Evidence

    @property
    def takes_any_width(self) -> bool:
        """Return whether there are kernels for latents of any width."""
        return self.wide == self.narrow == _ANY_WIDTH


HARDWARE = (
    Kernels("vllm", "CPU", "CPU_MLA (float32), AMX_MLA (bfloat16)", "none: Unsupported block size",
            seen.VLLM),
    Kernels("vllm", "A100", "Triton MLA", "Triton MLA", seen.VLLM_WIDTHS),
    Kernels("vllm", "H100", "FlashAttention-3 MLA, FlashMLA, Triton MLA", "Triton MLA", seen.VLLM_WIDTHS),
    Kernels("vllm", "Blackwell", "FlashInfer MLA, FlashMLA, CUTLASS MLA, Triton MLA",
            "FlashInfer MLA by its check of heads, Triton MLA", seen.VLLM_WIDTHS),
    Kernels("vllm+kvfold", "CPU", _ANY_WIDTH, _ANY_WIDTH, seen.VLLM_PLUGIN),
    Kernels("vllm+kvfold", "any GPU", "vLLM's own", "vLLM's Triton MLA", seen.VLLM_PLUGIN_READ),
    Kernels("sglang", "any GPU", "Triton, FlashInfer, FlashMLA, trtllm_mla", "Triton, padded to 512",
            seen.SGLANG_READ),
    Kernels("sglang", "CPU", _YARN_ALONE, _YARN_ALONE, seen.SGLANG_CPU),
    Kernels("llama.cpp", "CPU", _ANY_WIDTH, _ANY_WIDTH, seen.LLAMA_WIDTHS),
    Kernels("llama.cpp", "CUDA", "flash attention 576/512", "flash attention 320/256", seen.LLAMA_CUDA),
    Kernels("mlx", "CPU", _ANY_WIDTH, _ANY_WIDTH, seen.MLX),
    Kernels("tensorrt-llm", "any GPU", "its DeepSeek-V3 class, AutoDeploy", "AutoDeploy alone",
            seen.TENSORRT_WIDTHS),
)  # fmt: skip


def takes_any_width(engine: str, everywhere: bool = True) -> bool:
    """Return whether an engine has kernels for latents of any width.

    With `everywhere` on all hardware that is known here, otherwise on some.
    """
    rows = [row.takes_any_width for row in HARDWARE if row.engine == engine]
    return engine == "transformers" or (bool(rows) and (all(rows) if everywhere else any(rows)))


_VLLM = ("vllm", "vllm+kvfold")  # which the plugin changes for MLA alone
_GROUPED = ("grouped",)
_LATENT = ("stock", "decoupled")
_READ = "2026-11-22"
_TRANSFORMERS = read("transformers 5.23.0", _READ, "src/transformers/cache_utils.py")


class CacheFormats(NamedTuple):
    """The formats of one engine on one kind of hardware.

    Attributes:
        engine: of ENGINES.
        layouts: of LAYOUTS.
        hardware: where; `any` for no difference that is known.
        takes: by name of a format the engine's option for it.
        note: what else matters; empty for nothing.
        evidence: where it was read.
    """

    engine: str
    layouts: tuple[str, ...]
    hardware: str
    takes: Mapping[str, str]
    note: str
    evidence: Evidence


def _options(*names: str, **others: str) -> dict[str, str]:
    same = {name: f"--kv-cache-dtype {name}" for name in names}
    return {**same, **{name: f"--kv-cache-dtype {option}" for name, option in others.items()}}


_FP8 = _options("fp8_e4m3", "fp8_e5m2")
_UNSCALED = "scales of FP8 are 1.0 where the checkpoint gives none"
CACHE_FORMATS = (
    *(CacheFormats(engine, _GROUPED, "CPU", _FP8, "",
                   read("vLLM 0.32.0", _READ, "vllm/v1/attention/backends/cpu_attn.py"))
      for engine in _VLLM),
    *(CacheFormats(engine, _GROUPED, "GPU",
                   {**_FP8, **_options("nvfp4", int8="int8_per_token_head", int4="int4_per_token_head")},
                   "FP8 E4M3 in FlashAttention, FlashInfer and Triton; E5M2 in the last two; int8 and int4 "
                   f"in Triton alone; NVFP4 in FlashInfer alone; {_UNSCALED}",
                   read("vLLM 0.32.0", _READ,
                        "vllm/v1/attention/backends/flash_attn.py, flashinfer.py, triton_attn.py"))
      for engine in _VLLM),
    CacheFormats("vllm", _LATENT, "CPU", {}, "CPU_MLA keeps the model's dtype",
                 read("vLLM 0.32.0", _READ, "vllm/v1/attention/backends/mla/cpu_mla.py")),
    CacheFormats("vllm+kvfold", _LATENT, "CPU", {}, "the plugin keeps the model's dtype",
                 seen.VLLM_PLUGIN_READ),
    CacheFormats("vllm", _LATENT, "GPU", _options("fp8_e4m3"),
                 "in Triton MLA, FlashMLA, CUTLASS MLA and FlashInfer MLA; FlashAttention-3 MLA keeps 16 "
                 f"bits; latent and rotary key share one scale; {_UNSCALED}",
                 read("vLLM 0.32.0", _READ, "vllm/v1/attention/backends/mla/*.py")),
    CacheFormats("sglang", ("grouped", "stock"), "any", _FP8,
                 "not in every attention backend; scales of its fp4_e2m1 are powers of two; " + _UNSCALED,
                 read("SGLang docs 70310f0", _READ, "docs/advanced_features/quantized_kv_cache.md")),
    CacheFormats("mlx", ("stock",), "any", {},
                 "with --kv-bits its cache returns tuples, and its class cannot transpose their rotary key",
                 read("mlx-lm 04e6af1", _READ, "mlx_lm/models/deepseek_v3.py, cache.py")),
    CacheFormats("mlx", _GROUPED, "any", {},
                 "its own formats have a scale and an offset per 64 numbers (--kv-bits 8 or 4)",
                 read("mlx-lm 0d3ec31", _READ, "mlx_lm/models/base.py, cache.py")),
    CacheFormats("transformers", ("grouped", "stock", "decoupled"), "any",
                 {"fp8_e4m3": "generate(past_key_values=QuantizedCache('fp8', model.config))"},
                 "its scale is that of the largest number of the first forward pass, which reads exact "
                 "numbers; its 4 and 8 bits (quanto, hqq) have formats of their own",
                 _TRANSFORMERS),
    CacheFormats("transformers", ("intact",), "any", {},
                 "a QuantizedCache would round the positions that are cached next to the latent",
                 _TRANSFORMERS),
)  # fmt: skip
