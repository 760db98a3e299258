"""The evidence for each kind of output in each engine, and the widths that hardware has kernels for."""

from typing import Final, NamedTuple

from . import evidence as seen
from .evidence import Evidence

UNKNOWN: Final = "not known"
# The kinds of output, by `Written.layout`.
LAYOUTS = {
    "grouped": "GQA, MQA",
    "stock": "MLA stock",
    "decoupled": "MLA remote",
    "intact": "MLA remote, rope intact",
}
# (kind of output, engine) -> evidence that the rules for it rest on; None: not known.
PAIRS: dict[tuple[str, str], Evidence | None] = {
    ("grouped", "transformers"): seen.HF,
    ("grouped", "vllm"): seen.VLLM,
    ("grouped", "sglang"): seen.SGLANG_REGISTRY,
    ("grouped", "llama.cpp"): seen.LLAMA_RUN,
    ("grouped", "mlx"): seen.MLX,
    ("grouped", "tensorrt-llm"): seen.TENSORRT,
    ("grouped", "tgi"): None,
    ("stock", "transformers"): seen.HF,
    ("stock", "vllm"): seen.VLLM,
    ("stock", "sglang"): seen.SGLANG,
    ("stock", "llama.cpp"): seen.LLAMA_RUN,
    ("stock", "mlx"): seen.MLX,
    ("stock", "tensorrt-llm"): seen.TENSORRT,
    ("stock", "tgi"): seen.TGI,
    ("decoupled", "transformers"): seen.HF,
    ("decoupled", "vllm"): seen.VLLM,
    ("decoupled", "sglang"): seen.SGLANG_BACKEND,
    ("decoupled", "llama.cpp"): seen.LLAMA_CLASSES,
    ("decoupled", "mlx"): seen.MLX_BROKEN,
    ("decoupled", "tensorrt-llm"): None,
    ("decoupled", "tgi"): None,
    ("intact", "transformers"): seen.HF,
    ("intact", "vllm"): seen.VLLM,
    ("intact", "sglang"): seen.SGLANG_BACKEND,
    ("intact", "llama.cpp"): seen.LLAMA_CLASSES,
    ("intact", "mlx"): seen.MLX_BROKEN,
    ("intact", "tensorrt-llm"): None,
    ("intact", "tgi"): None,
}


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


HARDWARE = (
    Kernels("vllm", "CPU", "CPU_MLA (float32), AMX_MLA (bfloat16)", "none: Unsupported block size",
            seen.VLLM),
    Kernels("vllm", "A100", "Triton MLA", "Triton MLA", seen.VLLM_WIDTHS),
    Kernels("vllm", "H100", "FlashAttention-3 MLA, FlashMLA, Triton MLA", "Triton MLA", seen.VLLM_WIDTHS),
    Kernels("vllm", "Blackwell", "FlashInfer MLA, FlashMLA, CUTLASS MLA, Triton MLA",
            "FlashInfer MLA by its check of heads, Triton MLA", seen.VLLM_WIDTHS),
    Kernels("sglang", "any GPU", "Triton, FlashInfer, FlashMLA, trtllm_mla", "Triton, padded to 512",
            seen.SGLANG),
    Kernels("llama.cpp", "CPU", "any width", "any width", seen.LLAMA_RUN),
    Kernels("llama.cpp", "CUDA", "flash attention 576/512", "flash attention 320/256", seen.LLAMA_CUDA),
    Kernels("mlx", "CPU", "any width", "any width", seen.MLX),
    Kernels("tensorrt-llm", "any GPU", "its DeepSeek-V3 class", "AutoDeploy", seen.TENSORRT_NARROW),
)  # fmt: skip
