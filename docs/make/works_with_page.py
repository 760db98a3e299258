"""The page of other people's tools that were run on folds, from one table."""

from .markdown import table

INTRODUCTION = """# Works with

Each row was run by hand on a CPU, on small folds of the demo checkpoint, unless it says `read`.
[Engines](engines.md) have a page of their own, and so have tools that change a [loaded
model](quantize.md#a-loaded-model-under-other-tools). The mappings for AWQ are in
[Quantise](quantize.md#awq-by-llm-compressor).

The numbers of exporters are the largest differences between logits and those of transformers in float32. Both
were run on 40 tokens, without a cache.
"""
HEAD = ("tool", "version", "date", "command or call", "GQA, MQA", "stock MLA", "own code")
TOOLS = (
    ("ONNX Runtime", "1.32.0", "2026-11-30",
     "`torch.onnx.export(model, (ids,), FILE, dynamo=True)` of torch 2.13.0",
     "runs, 1.3e-5", "runs, 1.5e-5", "runs, 1.4e-5"),
    ("CTranslate2", "4.8.5", "2026-11-30",
     "`ctranslate2.converters.TransformersConverter(DIR).convert(OUT)`",
     "runs, 1.1e-5", "refused: no conversion is registered for DeepseekV3Config",
     "refused: no conversion is registered for KvfoldConfig"),
    ("llm-compressor, rounding to nearest", "0.14.0", "2026-11-30",
     "`oneshot(model=model, recipe=[QuantizationModifier(...)])`, W4A16, W8A8 and FP8_DYNAMIC",
     "saves; `kvfold eval` reads W8A8, others not tried", "saves; `kvfold eval` reads W4A16, FP8_DYNAMIC",
     "not tried"),
    ("llm-compressor, AWQ", "0.14.0", "2026-11-30", "`AWQModifier()`",
     "not tried", "ends with an error; runs with other mappings",
     "not tried"),
    ("bitsandbytes, NF4 and 8 bits", "0.50.2", "2026-11-30",
     "`from_pretrained(DIR, quantization_config=BitsAndBytesConfig(...)).save_pretrained(OUT)`",
     "saves; `kvfold eval` reads the output", "likewise", "likewise"),
    ("torchao", "0.18.0", "2026-11-30", "the same with `TorchAoConfig(Int8WeightOnlyConfig())`",
     "saves; `kvfold eval` refuses: \"is quantised by 'torchao', which kvfold does not read\"",
     "likewise", "likewise"),
    ("optimum-quanto, hqq", "0.2.7, 0.2.8", "2026-11-30",
     "the same with `QuantoConfig(weights='int8')`, `HqqConfig(nbits=4)`",
     "transformers 5.24.0 saves no quanto model, and does not load hqq yet", "likewise", "likewise"),
    ("PEFT, prefix tuning", "0.21.2", "2026-11-30",
     "`get_peft_model(model, PrefixTuningConfig(...))`, one gradient",
     "runs", "ends with \"Sizes of tensors must match\": its prefix has a key per head, the cache one latent",
     "ends likewise"),
    ("mergekit, linear", "0.1.5", "2026-11-30", "`mergekit-yaml FILE OUT --trust-remote-code`",
     "merges", "not tried",
     "merges; five of the six `*_kvfold.py` files are missing: copy them from the fold"),
    ("llama.cpp, cache in q8_0", "2026-11", "2026-11-30", "`-fa on -ctk q8_0 -ctv q8_0`",
     "read, not run: values in q8_0 need flash attention",
     "read, not run: both in q8_0, with flash attention", "no class"),
)  # fmt: skip


def works_with_page() -> str:
    """Return the page in Markdown."""
    return "\n".join([INTRODUCTION, table(HEAD, TOOLS)])
