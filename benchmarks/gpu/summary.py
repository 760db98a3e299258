"""Tables of what was measured, in Markdown: `python -m benchmarks.gpu summary`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfold.core.errors import InvalidInput

from ..reached import SHARES, summarise
from .ledger import PARTS, Row

Rows = dict[str, Row]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
FILE = "gpu.md"


def table(part: str, rows: Rows) -> str:
    """Return the Markdown tables of a part."""
    made = [_markdown(head, lines) for head, lines in TABLES[part](rows) if lines]
    return "\n\n".join(made)


def write_summary(out: Path) -> str:
    """Return the summary of all parts in `out`, and write it there as gpu.md.

    Raises:
        InvalidInput: there is no result.
    """
    files = {part: out / f"gpu-{part}.json" for part in PARTS}
    found = {
        part: json.loads(file.read_text(encoding="utf-8")) for part, file in files.items() if file.exists()
    }
    if not found:
        raise InvalidInput(f"{out} has no gpu-*.json; run a part first, or name its --out")
    words = []
    for part, result in found.items():
        here = result["machine"]
        words.append(f"## {TITLES[part]}")
        words.append(
            f"`python -m benchmarks.gpu {part}`, sizes {result['sizes']}, {here['gpu'] or here['processor']},"
            f" torch {here['torch']}, {result['seconds']:.0f} s. {len(result['not_run'])} rows were not run, "
            f"{len(result['failed'])} failed (results/gpu-{part}.json)."
        )
        words.append(table(part, result["rows"]))
    text = "\n\n".join(word for word in words if word) + "\n"
    (out / FILE).write_text(text, encoding="utf-8")
    return text


TITLES = {
    "kernel": "Decoding on a GPU",
    "train": "A source trained on the spot",
    "fold": "Folds of it",
    "distil": "Distillation of its folds",
    "large": "Folds of a real size",
    "pretrained": "A pretrained source",
}


def _markdown(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _number(value: Any, form: str = "{:.3g}") -> str:
    return "" if value is None else form.format(value)


def _kind(rows: Rows, kind: str) -> list[Row]:
    return [row for label, row in rows.items() if label.startswith(kind + " ")]


def _kernel(rows: Rows) -> list[Table]:
    speeds = [
        (
            f"{row['rank']}+{row['rope']}", str(row["context"]), str(row["batch"]),
            *(_number(row["ms_per_layer"].get(name)) for name in ("fused", "plain", "gqa", "mha")),
            *(_number(row["share_of_copy"].get(name), "{:.0%}") for name in ("fused", "gqa")),
        )
        for row in _kind(rows, "speed")
    ]  # fmt: skip
    steps = [
        (
            row["kind"], str(row["context"]), str(row["batch"]), _number(row["eager_ms"]),
            _number(row["compiled_ms"]), _number(row["logits_apart"], "{:.1e}"),
        )
        for row in _kind(rows, "step")
    ]  # fmt: skip
    right = [
        (
            str(len(_kind(rows, "check"))), str(len(_kind(rows, "agreement"))),
            _number(max((row["error"] for row in _kind(rows, "agreement")), default=None), "{:.1e}"),
        )
    ]  # fmt: skip
    tiles = [
        (label.removeprefix("tile "), _number(row["ms"]))
        for label, row in rows.items()
        if label.startswith("tile ")
    ]
    return [
        (("latents of a tile x tiles on their way", "ms per layer"), tiles),
        (("folds that are right", "widths and masks that agree", "largest error"), right),
        (
            (
                "width", "context", "batch", "kernel, ms per layer", "plain", "FlashAttention, GQA", "MHA",
                "kernel, of a copy's speed", "GQA",
            ),
            speeds,
        ),
        (("step of", "context", "batch", "eager, ms", "compiled with CUDA graphs", "logits apart"), steps),
    ]  # fmt: skip


def _retrieval(found: dict[str, dict[str, float]]) -> list[str]:
    return [_number(found[kind]["accuracy"], "{:.1%}") for kind in ("passkey", "multikey")]


def _train(rows: Rows) -> list[Table]:
    lines = [
        (
            label, f"{row['parameters'] / 1e6:.0f} M", f"{row['tokens'] / 1e6:.1f} M",
            str(row["tokens_per_second"]), _number(row["gpu_mb"], "{:.0f}"),
            _number(row["perplexity"], "{:.2f}"),
            *_retrieval(row["retrieval"]),
        )
        for label, row in rows.items()
        if "perplexity" in row
    ]  # fmt: skip
    head = ("source", "parameters", "tokens", "tokens/s", "peak MB", "perplexity", "passkey", "multikey")
    return [(head, lines)]


def _fold(rows: Rows) -> list[Table]:
    lines = [
        (
            label, _number(row["lost"], "{:.4f}"), _number(row["standard_error"], "{:.4f}"),
            *(_number(row[f"{phase}_seconds"]) for phase in ("plan", "fold", "evaluate")),
            _number(row["fold_gpu_mb"], "{:.0f}"), *_retrieval(row["retrieval"]["student"]),
            *_retrieval(row["retrieval"]["teacher"]),
        )
        for label, row in rows.items()
        if "lost" in row
    ]  # fmt: skip
    phases = [
        (label, _number(row["statistics_seconds"]), _number(row["statistics_gpu_mb"], "{:.0f}"))
        for label, row in rows.items()
        if "statistics_seconds" in row
    ]
    head = (
        "fold", "nats lost", "±", "plan, s", "fold, s", "evaluation, s", "fold, MB", "passkey", "multikey",
        "source's passkey", "multikey",
    )  # fmt: skip
    return [(("phase", "s", "MB"), phases), (head, lines)]


def _reached(line: Row) -> list[Row]:
    return [line.get(f"{share:.0%}", {}) for share in SHARES]


def _distil(rows: Rows) -> list[Table]:
    finished = _kind(rows, "recovery")
    reached = {
        (line["target"], line["start"], line["recipe"]): line.get("reached", {})
        for line in summarise(finished)
    }  # of the loss of a target's plain start, so that starts can be compared
    recoveries = [
        (
            f"{row['target']}, {row['start']}, {row['recipe']}", _number(row["source"], "{:.2f}"),
            *(_number(row["points"][end]["perplexity"], "{:.2f}") for end in (0, -1)),
            *(
                _number(one.get("median"), "{}")
                for one in _reached(reached[row["target"], row["start"], row["recipe"]])
            ),
            _number(row["seconds"]),
        )
        for row in finished
    ]  # fmt: skip
    steps = [
        (label.removeprefix("step "), _number(row["seconds"]), f"{row['peak_bytes'] / 1e6:.0f}")
        for label, row in rows.items()
        if label.startswith("step ")
    ]
    profiles = [
        (
            label, _number(row["metrics"][-1]["kl"], "{:.5f}"),
            _number(row["metrics"][-1]["tokens_per_second"]),
            _number(row["metrics"][-1]["peak_memory_gib"]),
        )
        for label, row in rows.items()
        if label.startswith("profile ")
    ]  # fmt: skip
    losses = [
        (
            one["loss"], one["kind"], _number(one["chunk_logits"], "{}"), _number(one["seconds"]),
            _number(one["times_dense"]), _number(one["peak_mb"], "{:.0f}"),
        )
        for one in rows.get("losses", {}).get("losses", [])
    ]  # fmt: skip
    return [
        (("run", "source", "at the start", "at the end", "tokens to 90 %", "95 %", "99 %", "s"), recoveries),
        (("step: trained, teacher", "s", "peak MB"), steps),
        (("profile", "KL of step 8", "tokens/s", "peak GiB"), profiles),
        (("loss", "form", "logits per chunk", "s", "of dense", "peak MB"), losses),
    ]


def _large(rows: Rows) -> list[Table]:
    lines = [
        (
            f"`{row['options']}`", _number(row["seconds"]), _number(row["peak_gpu_mb"], "{:.0f}"),
            _number(row["predicted_cpu_seconds"], "{:.0f}"),
        )
        for row in _kind(rows, "fold")
    ]  # fmt: skip
    return [(("fold", "s", "GPU's peak, MB", "predicted of its CPU, s"), lines)]


def _pretrained(rows: Rows) -> list[Table]:
    windows = list(dict.fromkeys(window for row in _kind(rows, "fold") for window in row["losses"]))
    lost = [
        (
            label.removeprefix("fold "), _number(row["fold_seconds"]), _number(row["predicted"]),
            *(
                f"{row['losses'][window]['lost']:.4f} ± {row['losses'][window]['standard_error']:.4f}"
                for window in windows
            ),
        )
        for label, row in rows.items()
        if label.startswith("fold ")
    ]  # fmt: skip
    points = [
        (
            label.removeprefix("training "), str(point["tokens"]),
            _number(point["eval_perplexity"], "{:.2f}"), _number(point.get("eval_kl")),
            _number(point.get("recovered_share"), "{:.1%}"),
        )
        for label, row in rows.items()
        if label.startswith("training ")
        for point in row["points"]
        if "eval_perplexity" in point
    ]  # fmt: skip
    return [
        (("fold", "s", "predicted", *(f"lost, windows of {window}" for window in windows)), lost),
        (("training of", "tokens", "perplexity", "KL", "recovered"), points),
    ]


TABLES: dict[str, Callable[[Rows], list[Table]]] = {
    "kernel": _kernel,
    "train": _train,
    "fold": _fold,
    "distil": _distil,
    "large": _large,
    "pretrained": _pretrained,
}
