"""The number formats in which engines store the cache of each layout of an output, and the evidence."""

from collections.abc import Mapping
from typing import NamedTuple

from ....core.cache_dtypes import cache_dtype
from ..engines import ENGINES
from ..lint import LintFinding
from .engine_pairs import UNKNOWN
from .evidence import Evidence, read

_GROUPED = ("grouped",)
_LATENT = ("stock", "decoupled")
_READ = "2026-11-22"
_TRANSFORMERS = read("transformers 5.23.0", _READ, "src/transformers/cache_utils.py")


class CacheFormats(NamedTuple):
    """The formats of one engine on one kind of hardware.

    Attributes:
        engine: of `engines.ENGINES`.
        layouts: of `engine_pairs.LAYOUTS`.
        hardware: where; `any` for no difference that is known.
        takes: by name of a format the engine's option for it.
        note: what else matters; empty for nothing.
        evidence: where it was read.
    """

    engine: str
    layouts: tuple[str, ...]
    hardware: str
    takes: Mapping[str, str]
    note: str
    evidence: Evidence


def _options(*names: str, **others: str) -> dict[str, str]:
    same = {name: f"--kv-cache-dtype {name}" for name in names}
    return {**same, **{name: f"--kv-cache-dtype {option}" for name, option in others.items()}}


_FP8 = _options("fp8_e4m3", "fp8_e5m2")
_UNSCALED = "scales of FP8 are 1.0 where the checkpoint gives none"
CACHE_FORMATS = (
    CacheFormats("vllm", _GROUPED, "CPU", _FP8, "",
                 read("vLLM 0.32.0", _READ, "vllm/v1/attention/backends/cpu_attn.py")),
    CacheFormats("vllm", _GROUPED, "GPU",
                 {**_FP8, **_options("nvfp4", int8="int8_per_token_head", int4="int4_per_token_head")},
                 "FP8 E4M3 in FlashAttention, FlashInfer and Triton; E5M2 in the last two; int8 and int4 in "
                 f"Triton alone; NVFP4 in FlashInfer alone; {_UNSCALED}",
                 read("vLLM 0.32.0", _READ,
                      "vllm/v1/attention/backends/flash_attn.py, flashinfer.py, triton_attn.py")),
    CacheFormats("vllm", _LATENT, "CPU", {}, "CPU_MLA keeps the model's dtype",
                 read("vLLM 0.32.0", _READ, "vllm/v1/attention/backends/mla/cpu_mla.py")),
    CacheFormats("vllm", _LATENT, "GPU", _options("fp8_e4m3"),
                 "in Triton MLA, FlashMLA, CUTLASS MLA and FlashInfer MLA; FlashAttention-3 MLA keeps 16 "
                 f"bits; latent and rotary key share one scale; {_UNSCALED}",
                 read("vLLM 0.32.0", _READ, "vllm/v1/attention/backends/mla/*.py")),
    CacheFormats("sglang", ("grouped", "stock"), "any", _FP8,
                 "not in every attention backend; scales of its fp4_e2m1 are powers of two; " + _UNSCALED,
                 read("SGLang docs 70310f0", _READ, "docs/advanced_features/quantized_kv_cache.md")),
    CacheFormats("mlx", ("stock",), "any", {},
                 "with --kv-bits its cache returns tuples, of which its class transposes the rotary key",
                 read("mlx-lm 04e6af1", _READ, "mlx_lm/models/deepseek_v3.py, cache.py")),
    CacheFormats("mlx", _GROUPED, "any", {},
                 "its own formats have a scale and an offset per 64 numbers (--kv-bits 8 or 4)",
                 read("mlx-lm 0d3ec31", _READ, "mlx_lm/models/base.py, cache.py")),
    CacheFormats("transformers", ("grouped", "stock", "decoupled"), "any",
                 {"fp8_e4m3": "generate(past_key_values=QuantizedCache('fp8', model.config))"},
                 "its scale is that of the largest number of the first forward pass, which reads exact "
                 "numbers; its 4 and 8 bits (quanto, hqq) have formats of their own",
                 _TRANSFORMERS),
    CacheFormats("transformers", ("intact",), "any", {},
                 "a QuantizedCache would round the positions that are cached next to the latent",
                 _TRANSFORMERS),
)  # fmt: skip


def format_findings(layout: str, engine: str, name: str) -> list[LintFinding]:
    """Return what an engine does with an output whose cache is to be in a number format.

    Args:
        layout: of `engine_pairs.LAYOUTS`.
        engine: of `engines.ENGINES`.
        name: of the format. In bfloat16 every engine that runs an output keeps its cache.

    Returns:
        A note for each kind of hardware that takes the format, or else one finding that none does, or that it
        is not known.

    Raises:
        InvalidInput: there is no such format.

    Example:
        >>> [finding.effect for finding in format_findings("stock", "vllm", "int4")]
        ['refuses to load']
    """
    assert engine in ENGINES
    cache_dtype(name)
    if name == "bfloat16":
        return []
    rows = [row for row in CACHE_FORMATS if row.engine == engine and layout in row.layouts]
    if not rows:
        words = f"kvfold has not read in which formats it stores such a cache; {name} is one of them or not"
        return [LintFinding(engine, UNKNOWN, words)]
    taking = [row for row in rows if name in row.takes]
    if not taking:
        known = sorted({known for row in rows for known in row.takes})
        instead = f"use {' or '.join(known)}" if known else "keep the cache in 16 bits"
        notes = "; ".join(row.note for row in rows if row.note)
        words = f"it does not store such a cache in {name}; {instead} ({notes})"
        return [LintFinding(engine, "refuses to load", words, rows[-1].evidence)]
    found = []
    for row in taking:
        where = "" if row.hardware == "any" else f" on a {row.hardware}"
        note = f"; {row.note}" if row.note else ""
        found.append(
            LintFinding(engine, "note", f"takes {name}{where}: {row.takes[name]}{note}", row.evidence)
        )
    return found
