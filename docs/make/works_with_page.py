"""The page of other people's tools that were run on folds, from one table."""

from .markdown import table

INTRODUCTION = """# Works with

Each row was run by hand on a CPU, on small folds of the demo checkpoint.
[Engines](engines.md) have a page of their own, and so have tools that change a [loaded
model](quantize.md#a-loaded-model-under-other-tools).

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
     "`oneshot(model=model, recipe=[QuantizationModifier(...)])`, W4A16",
     "not tried", "runs; `kvfold eval` reads the output", "not tried"),
    ("llm-compressor, AWQ", "0.14.0", "2026-11-30", "`AWQModifier()`",
     "not tried", "ends with an error; runs with [other mappings](quantize.md#awq-by-llm-compressor)",
     "not tried"),
)  # fmt: skip


def works_with_page() -> str:
    """Return the page in Markdown."""
    return "\n".join([INTRODUCTION, table(HEAD, TOOLS)])
