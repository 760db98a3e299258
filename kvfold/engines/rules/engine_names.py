"""Names of the engines that kvfold has rules for."""

from typing import Literal, get_args

from ...core.errors import InvalidInput

EngineName = Literal[
    "transformers", "vllm", "vllm+kvfold", "sglang", "llama.cpp", "mlx", "tensorrt-llm", "tgi"
]  # fmt: skip
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
NAMES = {  # as they call themselves
    "transformers": "transformers",
    "vllm": "vLLM",
    "vllm+kvfold": "vLLM with kvfold's plugin",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "mlx": "MLX",
    "tensorrt-llm": "TensorRT-LLM",
    "tgi": "TGI",
}


def read_engines(text: str | None) -> tuple[str, ...]:
    """Return the engines in a comma-separated list, each once; none where there is no list.

    Raises:
        InvalidInput: the list is empty, or kvfold has no rules for one of them.
    """
    if text is None:
        return ()
    if not text:
        raise InvalidInput(f"the list of engines is empty; choose from: {', '.join(ENGINES)}")
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ENGINES:
            raise InvalidInput(f"--engine {name!r} is unknown; choose from: {', '.join(ENGINES)}")
    return tuple(dict.fromkeys(names))
