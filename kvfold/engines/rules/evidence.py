"""Evidence of the rules: where each was run, or the file of an engine's source that it was read in."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One observation of an engine.

    Attributes:
        kind: `run`, the engine was executed; `read`, its source or its threads were read.
        version: name and version, or commit, of the engine.
        date: of the run or of the reading, `YYYY-MM` or `YYYY-MM-DD`.
        proof: the command that was run, or the file or thread that was read.
    """

    kind: Literal["run", "read"]
    version: str
    date: str
    proof: str

    def __str__(self) -> str:
        return f"{self.version}, {self.kind}"


def run(version: str, date: str, command: str) -> Evidence:
    """Return the evidence of a command that was run."""
    return Evidence(kind="run", version=version, date=date, proof=command)


def read(version: str, date: str, where: str) -> Evidence:
    """Return the evidence of a file, or a thread, that was read."""
    return Evidence(kind="read", version=version, date=date, proof=where)


HF = run("transformers 5.23.0", "2026-11", "kvfold verify DIR")
HF_LATENT = run("transformers 5.24.0", "2026-11-30", "tests/convert/families/test_latent_sources.py")
HF_MULTIMODAL = run("transformers 5.23.0", "2026-11-23", "kvfold verify DIR, on text")
HF_MODELOPT = run("transformers 5.23.0", "2026-11-23", "AutoModelForCausalLM.from_pretrained(DIR)")
HF4 = run("transformers 4.57.6", "2026-11", "AutoModelForCausalLM.from_pretrained(DIR)")
HF4_STATIC = run("transformers 4.57.6", "2026-11", "generate(cache_implementation='static')")
_VLLM = "vLLM 0.32.0 on a CPU"
VLLM = run(_VLLM, "2026-11-24", "python -m benchmarks.vllm")
VLLM_BROKEN = run(_VLLM, "2026-11", "vllm.LLM(DIR), on small outputs that break this by hand")
VLLM_MULTIMODAL = run(_VLLM, "2026-11-23", "python -m benchmarks.vllm, on text (language_model_only)")
VLLM_PLUGIN = run(f"{_VLLM}, with kvfold's plugin", "2026-11-29", "python -m benchmarks.vllm_plugin")
VLLM_PLUGIN_BROKEN = run(f"{_VLLM}, with kvfold's plugin", "2026-11-29", "vllm.LLM(DIR), on small outputs")
VLLM_PLUGIN_READ = read("vLLM 0.32.0", "2026-11-29", "vllm/config/model.py; kvfold/engines/vllm_plugin")
VLLM_READ = read("vLLM 0.32.0", "2026-11", "vllm/model_executor/models/deepseek_v2.py")
VLLM_WIDTHS = read("vLLM 0.32.0", "2026-11-22", "vllm/v1/attention/backends/mla/*.py")
VLLM_BACKEND = read("vLLM 0.32.0", "2026-11-22", "vllm/model_executor/models/transformers/base.py")
VLLM_PREFILL = read("vLLM 0.32.0", "2026-11", "vllm/v1/attention/backends/mla/prefill; vllm#48855")
SGLANG_READ = read("SGLang 0.5.23", "2026-11", "sglang/srt/models/deepseek_v2.py")
_SGLANG = "SGLang 0.5.23 on a CPU"
SGLANG = run(_SGLANG, "2026-11-27", "python -m benchmarks.sglang")
SGLANG_LATENT = run(f"{_SGLANG}, changed as docs/serve.md says", "2026-11-27", "python -m benchmarks.sglang")
SGLANG_BROKEN = run(_SGLANG, "2026-11-27", "python -m benchmarks.sglang_rules")
SGLANG_CPU = run(_SGLANG, "2026-11-27", "sglang.Engine(DIR, device='cpu', attention_backend='torch_native')")
SGLANG_WIDTHS = read(
    "SGLang 0.5",
    "2026-11-22",
    "sglang/srt/layers/attention/triton_ops, server_args.py; flash-attention, hopper/flash_api.cpp",
)
SGLANG_REGISTRY = read("SGLang 0.5.23", "2026-11-22", "sglang/srt/models/registry.py, model_loader/utils.py")
LLAMA = read("llama.cpp 0c1e570", "2026-11-22", "conversion/deepseek.py, src/models/deepseek2.cpp")
LLAMA_CLASSES = read("llama.cpp 0c1e570", "2026-11-22", "conversion/*.py")
LLAMA_RUN = run("llama.cpp 0.5.0-dev, 0c1e570, on a CPU", "2026-11-25", "python -m benchmarks.llama_cpp")
LLAMA_WIDTHS = run("llama.cpp 0.5.0-dev, 0c1e570, on a CPU", "2026-11-27", "python -m benchmarks.llama_cpp")
LLAMA_CUDA = read("llama.cpp", "2026-11", "llama.cpp#22205")
_MLX = "mlx-lm 0.32.2 with mlx[cpu] 0.32.4"
MLX = run(_MLX, "2026-11-25", "python -m benchmarks.mlx")
MLX_BROKEN = run(_MLX, "2026-11-25", "python -m benchmarks.mlx_rules")
MLX_READ = read("mlx-lm 0.32.2", "2026-11-22", "mlx_lm/models/deepseek_v3.py")
MLX_CLASSES = read("mlx-lm 0.32.2", "2026-11-22", "mlx_lm/models, mlx_lm/utils.py")
TENSORRT = read("TensorRT-LLM 065ff9e", "2026-11-22", "tensorrt_llm/_torch/models/_arch_index.py")
TENSORRT_WIDTHS = read(
    "TensorRT-LLM eea41b7",
    "2026-11-22",
    "cpp/tensorrt_llm/common/attentionOp.cpp; TensorRT-LLM#12266 (AutoDeploy)",
)
TGI = read(
    "TGI f190bc1",
    "2026-11-22",
    "server/text_generation_server/models/custom_modeling/flash_deepseek_v3_modeling.py",
)

_COMMON = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text",
    "phi3", "starcoder2", "cohere2",
}  # fmt: skip
_MOST = _COMMON | {
    "ministral3", "gemma", "gemma2", "phi", "olmo", "olmo2", "granite", "stablelm", "glm4", "cohere",
    "gpt_bigcode",
}  # fmt: skip

# engine -> the classes of its own; as read in their registries.
CLASSES: dict[str, frozenset[str]] = {
    "sglang": frozenset(_MOST),
    "llama.cpp": frozenset(_MOST | {"olmo3", "smollm3", "glm", "falcon"}),
    "mlx": frozenset(_MOST - {"olmo"} | {"olmo3", "smollm3", "glm"}),  # olmo wants the package ai2-olmo
    "tensorrt-llm": frozenset(_COMMON),
}

# engine -> the multimodal classes whose folds were run in it.
MULTIMODAL: dict[str, frozenset[str]] = {
    "vllm": frozenset({"llava", "mistral3", "gemma3", "qwen2_5_vl", "qwen3_vl"}),
}
