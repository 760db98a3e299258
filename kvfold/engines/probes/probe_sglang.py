"""One checkpoint in SGLang: the log-probabilities of a text, greedy tokens, and the cache.

This is a script that imports no kvfold. It reads one JSON object from stdin and writes one to stdout, as
probe.py does, whose answers it is compared with. SGLang's scheduler is a process of its own, which imports
this file before it starts.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

CACHE = Path("cache.json")  # in the directory of the run, where the scheduler writes what it has allocated
MARGIN = 16  # tokens: it accepts a few less than its context has
ENVIRONMENT = {
    # the last token that is asked for may lie just past a short model's end
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> None:
    """Score and continue the text that stdin gives."""
    sys.modules["kvfold"] = None  # type: ignore[assignment]
    asked = json.load(sys.stdin)
    import torch

    cuda = torch.cuda.is_available()
    os.environ |= ENVIRONMENT | ({} if cuda else {"SGLANG_USE_CPU_ENGINE": "1"})
    import sglang

    lacking = _lacking(asked, cuda)
    if lacking:
        print(json.dumps({"version": sglang.__version__, "lacking": lacking}))
        return
    settings = _settings(asked, cuda)
    engine = sglang.Engine(**settings)
    try:
        plain = {"temperature": 0.0, "ignore_eos": True}
        scoring = {**plain, "max_new_tokens": 1}
        outputs = engine.generate(
            input_ids=asked["text"], sampling_params=scoring, return_logprob=True, logprob_start_len=0
        )
        scores = [[step[0] for step in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs]
        prompts = [ids[: asked["prompt"]] for ids in asked["text"]]
        grown = engine.generate(
            input_ids=prompts, sampling_params={**plain, "max_new_tokens": asked["steps"]}
        )
    finally:
        engine.shutdown()
    told = {
        "version": sglang.__version__,
        "dtype": settings["dtype"],
        "log_probs": scores,
        "tokens": [output["output_ids"] for output in grown],
        "cache": json.loads(CACHE.read_text(encoding="utf-8")),
    }
    print(json.dumps(told if cuda else {**told, "by": "torch alone on a CPU"}), flush=True)


def _settings(asked: dict[str, Any], cuda: bool) -> dict[str, Any]:
    longest = max(len(asked["text"][0]), asked["prompt"] + asked["steps"])
    settings = {
        "model_path": asked["directory"],
        "load_format": "safetensors",  # by default it may also read pickles
        "dtype": asked["dtype"],
        "trust_remote_code": asked["trust"],
        "skip_tokenizer_init": True,
        "context_length": longest + MARGIN,
        "max_total_tokens": 2 * (longest + MARGIN) * len(asked["text"]),
        "disable_cuda_graph": True,
        "disable_radix_cache": True,  # which would answer a prompt from the text that was scored
        "random_seed": 0,
        "log_level": "error",
    }
    if cuda:
        # FlashInfer and FlashAttention-3, its defaults, take no float32 (read).
        return settings | ({"dtype": "bfloat16"} if asked["dtype"] == "float32" else {})
    return settings | {"device": "cpu", "attention_backend": "torch_native"}


def _lacking(asked: dict[str, Any], cuda: bool) -> str:
    """Return why a checkpoint cannot be judged by a run here; empty where it can."""
    if asked["multimodal"]:
        return "its multimodal classes need a processor of images, and kvfold asks for text alone"
    config = json.loads((Path(asked["directory"]) / "config.json").read_text(encoding="utf-8"))
    if not cuda and config.get("attn_logit_softcapping") is not None:
        return "its attention by torch leaves out the bound on scores (attn_logit_softcapping)"
    try:
        _changed(cuda)
    except (ImportError, AttributeError) as error:
        first, *_ = str(error).strip().splitlines() or [repr(error)]
        return f"it does not load here, or has not what kvfold knows of 0.5.23 ({first})"
    return ""


def _changed(cuda: bool) -> list[Any]:
    """Return what `prepare_scheduler` changes: a class and, on a CPU, two modules.

    Raises:
        ImportError, AttributeError: this SGLang does not have it.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    needed: list[tuple[Any, str]] = [(ModelRunner, "alloc_memory_pool")]
    if not cuda:
        from sglang.srt.layers.rotary_embedding import factory
        from sglang.srt.models.deepseek_common import attention_backend_handler as choice

        needed += [(factory, "get_rope_cpu"), (choice, "AttentionBackendRegistry")]
    for owner, name in needed:
        getattr(owner, name)
    return [owner for owner, _ in needed]


def prepare_scheduler() -> None:
    """Let the scheduler write the size of its cache and, on a CPU, run DeepSeek's classes by torch alone.

    SGLang 0.5.23 has latent attention on a CPU only by kernels for Intel's AMX: its table of rotary angles
    knows only YaRN there, and `torch_native`, which runs anywhere, gets expanded keys while the cache holds
    latents. Here the table is the one that it makes on GPUs, and all is computed from the latents, as in
    decoding on GPUs.
    """
    sys.modules["kvfold"] = None  # type: ignore[assignment]
    import torch

    runner_class, *others = _changed(torch.cuda.is_available())
    allocate = runner_class.alloc_memory_pool

    def allocate_and_tell(runner: Any, *given: Any, **named: Any) -> None:
        allocate(runner, *given, **named)
        CACHE.write_text(json.dumps(_elements(runner)), encoding="utf-8")

    runner_class.alloc_memory_pool = allocate_and_tell
    if not others:
        return
    factory, choice = others

    def rope_of_gpus(*given: Any) -> Any:
        *table, _ = given  # a device comes last, which others do not take
        return factory.get_rope(*table)

    factory.get_rope_cpu = rope_of_gpus
    choice.AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: choice.AttnForwardMethod.MLA
    )


def _elements(runner: Any) -> list[float]:
    """Return what SGLang allocates per token in every layer, in elements."""
    pool, sizes = runner.token_to_kv_pool, []
    for layer in range(runner.model_config.num_hidden_layers):
        keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        shared = keys.data_ptr() == values.data_ptr()  # a latent, which values are the first part of
        sizes.append(sum(part[0].numel() for part in ((keys,) if shared else (keys, values))))
    return [float(size) for size in sizes]


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # SGLang's scheduler
    prepare_scheduler()
