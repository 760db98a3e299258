"""Classes that engines have for kvfold's families, by `model_type`, as read in their registries."""

_COMMON = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text",
    "phi3", "starcoder2", "cohere2",
}  # fmt: skip
_MOST = _COMMON | {
    "ministral3", "gemma", "gemma2", "phi", "olmo", "olmo2", "granite", "stablelm", "glm4", "cohere",
    "gpt_bigcode",
}  # fmt: skip

# engine -> the classes of its own; evidence.py names the registries.
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
