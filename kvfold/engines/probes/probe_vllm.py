"""One checkpoint in vLLM: the log-probabilities of a text, greedy tokens, and the cache.

This is a script that imports no kvfold; where it is asked to, vLLM loads kvfold's plugin. It reads one JSON
object from stdin and writes one to stdout, as probe.py does, whose answers it is compared with.
"""

import json
import os
import sys
from typing import Any

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the engine ends with this process
    "VLLM_NO_USAGE_STATS": "1",  # otherwise it reports to a server
    "VLLM_HOST_IP": "127.0.0.1",
    # the last token that is asked for may lie just past a short model's end
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
}
PIECE = 48  # tokens that are computed at once with the plugin


def main() -> None:
    """Score and continue the text that stdin gives."""
    asked = json.load(sys.stdin)
    if not asked["plugin"]:
        sys.modules["kvfold"] = None  # type: ignore[assignment]
    os.environ |= {**ENVIRONMENT, "VLLM_PLUGINS": "kvfold" if asked["plugin"] else ""}
    import torch
    import vllm

    settings = _settings(asked, torch.cuda.is_available())
    lacking = _unloaded() if asked["multimodal"] else ""
    lacking = lacking or ("" if torch.cuda.is_available() else _lacking(vllm, settings, asked["plugin"]))
    if lacking:
        print(json.dumps({"version": vllm.__version__, "lacking": lacking}))
        return
    model = vllm.LLM(**settings)
    plain: dict[str, Any] = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
    scoring = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, **plain)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in asked["text"]], scoring, use_tqdm=False)
    scores = [
        [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        for output, ids in zip(outputs, asked["text"], strict=True)
    ]
    prompts = [{"prompt_token_ids": ids[: asked["prompt"]]} for ids in asked["text"]]
    grown = model.generate(prompts, vllm.SamplingParams(max_tokens=asked["steps"], **plain), use_tqdm=False)
    # what vLLM allocates per token in every layer, in elements.
    (layers,) = model.collective_rpc("get_kv_cache_spec")
    told = {
        "version": vllm.__version__,
        "dtype": str(model.llm_engine.model_config.dtype).removeprefix("torch."),
        "log_probs": scores,
        "tokens": [list(output.outputs[0].token_ids) for output in grown],
        "cache": [
            layer.page_size_bytes / layer.block_size / layer.dtype.itemsize for layer in layers.values()
        ],
    }
    print(json.dumps(told))


def _settings(asked: dict[str, Any], cuda: bool) -> dict[str, Any]:
    longest = max(len(asked["text"][0]), asked["prompt"] + asked["steps"]) + 1
    settings: dict[str, Any] = {
        "model": asked["directory"],
        "max_model_len": longest,
        "trust_remote_code": asked["trust"],
    }
    if asked["plugin"]:
        settings["trust_remote_code"] = False
    if asked["plugin"] and asked["latent"]:
        # The plugin also has to serve in pieces and from cached prefixes.
        settings |= {"enable_prefix_caching": True, "block_size": 16}
        settings |= {"enable_chunked_prefill": True, "max_num_batched_tokens": PIECE, "max_num_seqs": PIECE}
    if asked["multimodal"]:
        settings["language_model_only"] = True  # text alone, which needs no processor of images
    settings |= {"dtype": asked["dtype"], "enforce_eager": True, "skip_tokenizer_init": True, "seed": 0}
    if cuda:
        # Latent attention has no float32 kernel there.
        return settings | ({"dtype": "bfloat16"} if asked["dtype"] == "float32" else {})
    # The CPU's rotary kernel turns queries of several heads wrongly, and its default latent kernel takes no
    # float32.
    settings |= {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
    return settings | ({"attention_backend": "CPU_MLA"} if asked["latent"] else {})


def _lacking(vllm: Any, settings: dict[str, Any], plugin: bool) -> str:
    """Return the width that the CPU's kernels are not compiled for, where there is one; a GPU's may be.

    With kvfold's `plugin` there is none for latent attention.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    model = vllm.EngineArgs(**settings).create_engine_config().model_config
    width = model.get_head_size()
    if plugin and model.use_mla:
        return ""
    known = (CPUMLABackend if model.use_mla else CPUAttentionBackend).get_supported_head_sizes()
    if width in known:
        return ""
    return f"no kernel for this CPU has attention {width} wide (it has {', '.join(map(str, known))})"


def _unloaded() -> str:
    """Return why torchvision, which multimodal classes import, cannot be loaded; empty where it can."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # a build for CUDA next to a torch for CPUs
        return f"its multimodal classes import torchvision, which does not load here ({error})"
    return ""


if __name__ == "__main__":
    main()
