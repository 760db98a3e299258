"""Checkpoints' directories as a report reads them: JSON alone, no weights."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvfold.cli import main

LAYERS = 3
_LACKING = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
NEEDS_EXTRA = pytest.mark.skipif(bool(_LACKING), reason=f"the extra `report` is not installed: {_LACKING}")


def run_report(*arguments: Any) -> Result:
    """Run `kvfold report` in this process."""
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def estimate(mean: float, error: float = 0.01) -> dict[str, float]:
    return {"mean": mean, "standard_error": error, "low": mean - 2 * error, "high": mean + 2 * error}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "q1": 0.9 * median, "q3": 1.2 * median}


def measured(perplexity: float) -> dict[str, Any]:
    return {
        "perplexity": perplexity, "nll": estimate(2.5), "bits_per_byte": 1.1, "byte_perplexity": 2.1,
        "word_perplexity": None, "dtype": "float32", "window_nll": [2.5],
    }  # fmt: skip


def cached(elements: int) -> dict[str, Any]:
    contexts = [{"tokens": 4096, "bytes": elements * 4096, "largest_batch": None}]
    return {
        "elements_per_token_per_layer": elements, "predicted_elements_per_token_per_layer": elements,
        "elements_per_token": 2 * elements, "bytes_per_token": 8 * elements, "dtype": "float32",
        "predicted_bytes_per_token": 4 * elements, "stored_dtype": "bfloat16", "weight_bytes": 10**6,
        "contexts": contexts,
    }  # fmt: skip


def suites(perplexity: float, elements: int, kl: float = 0.1, parent: float | None = None) -> dict[str, Any]:
    """Return results of the default suites for a checkpoint whose source has perplexity 10 and 64 elements."""
    ratio = estimate(perplexity / 10)
    recovered = {"value": 0.75, "reason": None} if parent else {"value": None, "reason": "no folded parent"}
    return {
        "ppl": {
            "student": measured(perplexity), "teacher": measured(10.0),
            "parent": parent and measured(parent), "difference": estimate(0.1), "ratio": ratio,
            "recovered_share": recovered, "window_tokens": [63],
        },
        "fidelity": {
            "kl": estimate(kl),
            "kl_percentiles": {
                name: estimate(kl * place) for place, name in enumerate(("p1", "p50", "p99_9"))
            },
            "kl_max": 9 * kl,
            "same_top1": estimate(0.9),
            "delta_p": estimate(-0.01),
            "delta_p_rms": estimate(0.02),
            "delta_p_percentiles": {"p50": estimate(0.0)},
            "nll_correlation": None,
            "kl_by_position": [
                {"first": 2**n, "last": 2 ** (n + 1) - 1, "kl": estimate(kl)} for n in range(4)
            ],
        },
        "cache": {
            "student": cached(elements), "teacher": cached(64), "parent": None, "ratio": elements / 64,
            "memory": None,
        },
    }  # fmt: skip


def speed() -> dict[str, Any]:
    phase = {"milliseconds": spread(5.0), "tokens_per_second": spread(200.0)}
    timing = {"prefill": phase, "decode": phase, "peak_bytes": 10**6}
    cells = [
        {
            "batch": batch, "context": context, "tokens": 16, "rounds": 3, "student": timing,
            "teacher": timing, "decode_speedup": spread(1.25),
        }
        for batch in (1, 4)
        for context in (64, 128)
    ]  # fmt: skip
    skipped = {"batch": 4, "context": 256, "tokens": 16, "rounds": 0, "skipped": "out of memory"}
    return {"machine": "a machine", "interleaved": True, "cells": [*cells, skipped]}


def retrieval(accuracy: float) -> dict[str, Any]:
    grid = [[accuracy, accuracy], [0.0, accuracy]]
    needles = {
        "lengths": [128, 256],
        "depths": [0.0, 1.0],
        "samples": 10,
        "accuracy": grid,
        "standard_error": grid,
        "low": grid,
        "high": grid,
        "choice": [[0.5, 0.5], [0.1, 0.9]],
        "choice_standard_error": grid,
        "rank": grid,
        "overall": {"accuracy": estimate(accuracy), "choice": estimate(0.5), "rank": estimate(3.0)},
    }
    kinds = {"passkey": needles, "multikey": needles}
    return {
        "candidates": 10, "chance": 0.1, "seed": 0, "filler_sha256": "cd" * 32, "student": kinds,
        "teacher": kinds, "parent": None, "difference": None,
    }  # fmt: skip


def tasks() -> dict[str, Any]:
    metric = {
        "student": estimate(0.4),
        "teacher": estimate(0.5),
        "parent": None,
        "difference": estimate(-0.1),
        "flips": {"right_to_wrong": 12, "wrong_to_right": 2, "p_value": 0.0123},
    }
    scores = {"samples": 100, "shots": 0, "primary": "acc_norm", "metrics": {"acc_norm": metric}}
    average = {"student": 0.4, "teacher": 0.5, "parent": None, "difference": estimate(-0.1)}
    return {
        "harness": "0.4.9", "limit": None, "fewshot": None, "tasks": {"arc_easy": scores},
        "average": average,
    }  # fmt: skip


def record(name: str = "mla", stage: str = "convert") -> dict[str, Any]:
    """A kvfold.json."""
    sizes = {"mla": {"kv_lora_rank": 2, "qk_rope_head_dim": 4}, "gqa": {"num_key_value_heads": 2}}
    spectrum = {"size": 4, "index": [1, 2, 3, 4], "cost": [0.1, 0.01, 0.001, 0.0]} if name == "mla" else None
    layer = {
        "planned": {"slots": 0.01, "latent": 0.02},
        "measured": {"folded": 0.03, "refined": 0.02},
        "spectrum": spectrum,
    }
    return {
        "schema": 1,
        "stage": stage,
        "source": {"name": "source", "path": "/nowhere", "revision": None, "files": {}},
        "parents": [],
        "command": f"kvfold convert source --to {name}",
        "calibration": {"text": "self", "tokens": 4096, "seed": 0},
        "target": {"name": name, **sizes[name]},
        "cache": {
            "before": {"elements_per_token_per_layer": 64, "bytes_per_token": 1024},
            "after": {"elements_per_token_per_layer": 16, "bytes_per_token": 256},
            "ratio": 0.25,
        },
        "layers": [layer] * LAYERS,
    }


def write_checkpoint(
    directory: Path,
    found: dict[str, Any] | None = None,
    source: str | None = "source",
    text: str = "a text",
    kept: dict[str, Any] | None = None,
) -> Path:
    """A directory with eval.json, and with kvfold.json where `kept` is given."""
    directory.mkdir(parents=True)
    (directory / "eval.json").write_text(
        json.dumps(report(directory, found or suites(12.0, 16), source, text))
    )
    if kept is not None:
        (directory / "kvfold.json").write_text(json.dumps(kept))
    return directory


def generation(right: float) -> dict[str, Any]:
    """Numbers of a checkpoint that answers a share of the questions, all of which its source answers."""
    model = {
        "right": estimate(right), "by_task": {"sorting": estimate(right)}, "length": estimate(12.0),
        "endless": estimate(0.0), "repeated": estimate(0.2), "nll": estimate(1.5),
    }  # fmt: skip
    difference = {
        "right": estimate(right - 1), "kept": estimate(right), "length": estimate(1.25),
        "agreement": {"1": estimate(0.9), "8": estimate(0.5)}, "parting": 6.5,
        "parting_by_entropy": [{"entropy": 0.5, "rate": 0.01, "tokens": 100}],
        "kl_own_text": estimate(0.0375), "kl_teacher_text": estimate(0.04),
    }  # fmt: skip
    return {
        "prompts": 9, "prompts_sha256": "ab" * 32, "questions": 16, "tokens": 32, "seed": 0,
        "student": model, "teacher": model | {"right": estimate(1.0)}, "parent": None,
        "difference": difference, "parent_difference": None,
    }  # fmt: skip


def report(
    directory: Path, found: dict[str, Any], source: str | None = "source", text: str | None = "a text"
) -> dict[str, Any]:
    """An eval.json; without a source nothing in it is paired."""
    protocol = {
        "name": f"text:{text}", "text_sha256": "ab" * 32, "window": 64, "windows": 9, "bos": "each",
        "scored_tokens": 567, "scored_bytes": 2000,
    }  # fmt: skip
    if source is None:
        found["ppl"] |= {"teacher": None, "ratio": None}
        found["cache"] |= {"teacher": None, "ratio": None}
        found["fidelity"] = None
    return {
        "schema": 2,
        "checkpoint": {"path": str(directory), "name": directory.name, "identity": f"sha of {directory}"},
        "teacher": source and {"path": "/nowhere", "name": source, "identity": f"sha of {source}"},
        "parent": None,
        "protocol": text and protocol,
        "suites": found,
        "device": "cpu",
        "versions": {"kvfold": "0.1.0"},
    }


def write_example(root: Path) -> list[Path]:
    """Folds of one source, one of them distilled, with everything that a page can show."""
    everything = {
        "speed": speed(),
        "retrieval": retrieval(0.5),
        "tasks": tasks(),
        "generation": generation(0.75),
    }
    half = write_checkpoint(root / "half", suites(10.5, 32, 0.02) | everything, kept=record())
    quarter = write_checkpoint(root / "quarter", suites(12.0, 16), kept=record("gqa"))
    distilled = write_checkpoint(
        root / "distilled", suites(11.0, 16, 0.05, parent=12.0), kept=record(stage="distill")
    )
    lines = [{"step": n, "stage": "kl", "tokens": 1000 * n, "kl": 1 / n} for n in range(1, 101)]
    (distilled / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = [
        {"step": n, "stage": "kl", "tokens": 1000 * n, "perplexity": 12 - n / 100} for n in range(0, 101, 20)
    ]
    curve = {"text": "text:a", "text_sha256": "ab", "teacher_perplexity": 10.0, "points": points}
    (distilled / "curve.json").write_text(json.dumps(curve))
    return [half, quarter, distilled]
