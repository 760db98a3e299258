"""The perplexity of a finished run against tokens: curve.json, and curve.png if matplotlib is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.console import notice
from ...core.files import write_json

_KEPT = ("step", "stage", "tokens", "perplexity", "kl", "same_top1", "recovered_share")


def write_curve(directory: Path, history: list[dict[str, Any]]) -> None:
    """Write both files into a directory.

    Args:
        directory: the output.
        history: the lines of evaluations.jsonl.
    """
    curve = {
        "text": history[0]["text"],
        "text_sha256": history[0]["text_sha256"],
        "teacher_perplexity": history[0]["teacher"]["perplexity"],
        "points": [{key: line[key] for key in _KEPT} for line in history],
    }
    write_json(directory / "curve.json", curve)
    if find_spec("matplotlib") is None:
        notice(
            "no curve.png: matplotlib is not installed (pip install 'kvfold[report]'); curve.json has the "
            "numbers"
        )
        return
    _draw(curve, directory / "curve.png")


def _draw(curve: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    points = curve["points"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for stage in dict.fromkeys(point["stage"] for point in points):
        own = [at for at, point in enumerate(points) if point["stage"] == stage]
        # The line of each stage begins where the one before it ends.
        part = points[max(0, own[0] - 1) : own[-1] + 1]
        tokens, perplexities = zip(*((point["tokens"], point["perplexity"]) for point in part), strict=True)
        axes.plot(tokens, perplexities, marker="o", markersize=3, label=stage)
    axes.axhline(curve["teacher_perplexity"], color="black", linestyle="--", linewidth=1, label="teacher")
    axes.axhline(points[0]["perplexity"], color="grey", linestyle=":", linewidth=1, label="start")
    share = points[-1]["recovered_share"]
    title = curve["text"] if share is None else f"{curve['text']}: {share:.1%} recovered"
    axes.set(xlabel="tokens trained on", ylabel="perplexity", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:.4g}")
    axes.yaxis.set_minor_formatter("{x:.4g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
