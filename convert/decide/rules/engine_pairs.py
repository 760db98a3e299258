"""The evidence for each kind of output in each engine, and the widths that hardware has kernels for."""

from typing import Final, NamedTuple

from ...formats.serving_widths import PROFILES
from ..engines import ENGINES
from . import evidence as seen
from .evidence import Evidence

UNKNOWN: Final = "not known"
OTHER_WIDTHS: Final = "other widths"
_SERVED = {(profile.latent, profile.rope): str(profile) for profile in PROFILES}
_BY_WIDTHS = ("stock", "decoupled")  # layouts that engines run in some widths and not in others

# The layouts of outputs, as `Written.layout`.
LAYOUTS = {
    "grouped": "GQA, MQA",
    "stock": "MLA stock",
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

    Args:
        layout: of LAYOUTS.
        cached: widths of the latent and the rotary key.
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
    "grouped": (seen.HF, seen.VLLM, seen.SGLANG, seen.LLAMA_RUN, seen.MLX, seen.TENSORRT, None),
    "stock 512+64": (
        seen.HF, seen.VLLM, seen.SGLANG_LATENT, seen.LLAMA_RUN, seen.MLX, seen.TENSORRT, seen.TGI,
    ),
    "stock 256+64": (
        seen.HF, seen.VLLM_WIDTHS, seen.SGLANG_LATENT, seen.LLAMA_RUN, seen.MLX, seen.TENSORRT_WIDTHS,
        seen.TGI,
    ),
    "stock other widths": (
        seen.HF, seen.VLLM_BROKEN, seen.SGLANG_LATENT, seen.LLAMA_WIDTHS, seen.MLX, seen.TENSORRT_WIDTHS,
        seen.TGI,
    ),
    "decoupled 512+64": (
        seen.HF, seen.VLLM, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN, None, None,
    ),
    "decoupled 256+64": (
        seen.HF, seen.VLLM_WIDTHS, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN, None, None,
    ),
    "decoupled other widths": (
        seen.HF, seen.VLLM_BROKEN, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN, None, None,
    ),
    "intact": (
        seen.HF, seen.VLLM, seen.SGLANG_BROKEN, seen.LLAMA_CLASSES, seen.MLX_BROKEN, None, None,
    ),
    "multimodal": (seen.HF_MULTIMODAL, seen.VLLM_MULTIMODAL, *5 * (None,)),
    "multimodal stock": (seen.HF_MULTIMODAL, *6 * (None,)),
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

    Args:
        engine: of ENGINES.
        everywhere: on all hardware that is known here; False: on some.
    """
    rows = [row.takes_any_width for row in HARDWARE if row.engine == engine]
    return engine == "transformers" or (bool(rows) and (all(rows) if everywhere else any(rows)))
