"""The engines that `kvfold verify` starts here, and a run of llama.cpp on a converted checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .fresh_process import MODULES, Check, check_cache, run_apart
from .llama_programs import LlamaCpp, LlamaFailure, read_base
from .vllm_plugin import unknown_release

if TYPE_CHECKING:
    from .rules.rule_types import LintFinding

CONTEXT, CHUNKS = 128, 4  # tokens of a window, of which the second half is scored, and windows
LETTERS_PER_TOKEN = 16  # more than a token has on average
LETTERS = 60  # of the text, at most: the prompt of greedy decoding
STEPS = 16  # tokens that greedy decoding adds, as in probe.py
NEAR = 2e-3  # by which log-probabilities may differ in float32: the file rounds them to 2.4e-4


def started_engines(
    asked: Sequence[str], findings: Sequence[LintFinding], llama_cpp: Path | None, *, run: bool
) -> tuple[tuple[str, ...], list[str]]:
    """Return the engines that run the checkpoint, and sentences about the others."""
    started, unasked = [], []
    for engine in asked:
        if engine == "transformers":
            continue  # which runs every checkpoint
        if engine in MODULES:
            lacking = "" if find_spec(MODULES[engine]) else "is not installed here"
            if engine == "vllm+kvfold" and not lacking:
                lacking = _plugin_lack()
        elif engine == "llama.cpp":
            lacking = "" if llama_cpp is not None else "is not started without --llama-cpp DIR"
        else:
            lacking = "is never started"
        if lacking or not run:
            unasked.append(f"{engine} {lacking or 'was not started'}: only its rules were applied")
        elif any(found.engine == engine and found.fails for found in findings):
            unasked.append(f"{engine} was not started: a broken rule already says how that would fail")
        else:
            started.append(engine)
    return tuple(started), unasked


def _plugin_lack() -> str:
    """Return why the installed vLLM would not use kvfold's plugin; empty where it would."""
    if not entry_points(group="vllm.general_plugins", name="kvfold"):
        return "was not started: kvfold is not installed as a package here (pip install kvfold)"
    reason = unknown_release(version(packages_distributions()["vllm"][0]))
    return reason and f"was not started: {reason}"


def run_llama_cpp(
    llama: LlamaCpp, directory: Path, source: Path | None, claimed: float | None
) -> tuple[list[Check], dict[str, Any]]:
    """Convert a checkpoint to GGUF, run it in llama.cpp, and compare it with transformers and its source.

    The text is Python's standard library. llama.cpp tokenizes it; transformers gets the same tokens.

    Args:
        llama: the converter and the programs.
        directory: the checkpoint.
        source: the checkpoint that it was made from, for llama.cpp's own KL divergence; None: none.
        claimed: elements per token and layer that the record says are cached.

    Returns:
        The checks, and their numbers.
    """
    from ..texts.corpus import read_text

    with TemporaryDirectory() as place:
        work = Path(place)
        text = work / "text.txt"
        text.write_text(read_text("stdlib").joined[: CONTEXT * CHUNKS * LETTERS_PER_TOKEN], encoding="utf-8")
        try:
            return _compare(llama, work, directory, source, claimed)
        except LlamaFailure as failure:
            return [Check("llama.cpp", False, str(failure))], {}


def _compare(
    llama: LlamaCpp, work: Path, directory: Path, source: Path | None, claimed: float | None
) -> tuple[list[Check], dict[str, Any]]:
    text = work / "text.txt"
    ours = llama.convert(directory, work / "ours.gguf", "f32")
    size = llama.perplexity(ours, text, work / "ours.base", CONTEXT, CHUNKS)
    found = read_base(work / "ours.base")
    prompt = text.read_text(encoding="utf-8")[:LETTERS]
    asked = {"directory": str(directory.resolve()), "texts": found.tokens, "prompt": prompt}
    seen = run_apart("probe.py", asked)
    if "failed" in seen:
        raise LlamaFailure(f"transformers does not score llama.cpp's tokens: {seen['failed']}")
    gaps = [abs(a - b) for a, b in zip(found.scores(), seen["scores"], strict=True)]
    most = max(gaps, key=lambda gap: (math.isnan(gap), gap))  # plain `max` may pass over a NaN
    continued = llama.complete(ours, prompt, STEPS)
    numbers: dict[str, Any] = {
        "version": llama.version,
        "max_difference": most,
        "mean_difference": sum(gaps) / len(gaps),
        "same_text": _same(continued, seen["continued"]),
        "cache": size,
    }
    words = f"{llama.version} in float32 gives log-probabilities at most {most:.1e} from transformers'"
    checks = [Check("llama.cpp", most <= NEAR, words)]
    same = numbers["same_text"]
    told = "is transformers'" if same else f"is {continued!r}, transformers' is {seen['continued']!r}"
    is_tie = not same and seen["least_lead"] <= 2 * NEAR
    checks.append(Check("llama.cpp greedy", None if is_tie else same, f"greedy text {told}"))
    unknown = Check("llama.cpp cache", None, "it does not print the size of its cache")
    checks.append(unknown if size is None else check_cache(size, claimed, "llama.cpp"))
    if directory in llama.guessed:
        words = "the converter does not know this tokenizer; for this run it was written as GPT-2's"
        checks.append(Check("llama.cpp tokenizer", None, words))
    if source is not None:
        theirs = llama.convert(source, work / "source.gguf", "f32")
        llama.perplexity(theirs, text, work / "source.base", CONTEXT, CHUNKS)
        block = llama.divergence(ours, work / "source.base", text, CONTEXT, CHUNKS)
        measure = "llama.cpp's own measure" if block else "the log-probabilities that llama.cpp writes"
        block = block or found.distance(read_base(work / "source.base"))
        numbers["kl"] = block
        words = f"KL {block['mean']:.2e} nats by {measure}, same top-1 {block['same_top']:.1%}"
        checks.append(Check("llama.cpp source", None, words))
    return checks, numbers


def _same(ours: str, theirs: str) -> bool:
    """Return whether two continuations are equal, as far as the shorter one goes.

    llama.cpp may print one token less, and no white space at the end.
    """
    shorter, longer = sorted((ours.rstrip(), theirs.rstrip()), key=len)
    return bool(shorter) and longer.startswith(shorter) and 2 * len(shorter) >= len(longer)
