"""`python -m docs.make.figures`: the figures of Concepts and of the README, as SVG in docs/figures.

Those of Concepts show real folds of the bundled demo checkpoint; the others show benchmarks/results. Folds
are made in a temporary directory: some minutes on two cores. `--quick` makes them from less text, as a trial.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import click

import kvfold
from kvfold.results import Folded

from .drawing import Plot, boxes, draw

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes" / "demo"
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
BUDGETS = ("50%", "25%", "12.5%")
SHARES = {-float(budget.rstrip("%")): f"{budget[:-1]} %" for budget in BUDGETS}
# Rows of benchmarks/fidelity.py, and their names in the README's picture.
RULES = {
    "gqa mean": "GQA, mean",
    "gqa": "GQA, kvfold",
    "mla transmla": "MLA, TransMLA's rule",
    "mla mha2mla": "MLA, MHA2MLA's rule",
    "mla care": "MLA, CARE's rule",
    "mla": "MLA, kvfold",
}
CACHE, LOST = "cache, share of the source's", "nats per token lost"
SOURCES = {"story-1m-gqa": "stories, 1 M", "prose-6m-mha": "prose, 6.6 M"}


def overview() -> str:
    """Return the picture of the README: perplexity against cache before any training, for several rules."""
    plots = []
    for name, title in SOURCES.items():
        found = json.loads((RESULTS / f"fidelity-{name}.json").read_text(encoding="utf-8"))
        lines = {}
        for row, label in RULES.items():
            rows = found["rows"][row]
            lines[label] = [
                (-float(budget.rstrip("%")), found["source_perplexity"] * math.exp(rows[budget]["lost"]))
                for budget in BUDGETS
                if budget in rows
            ]
        lines["source"] = [(place, found["source_perplexity"]) for place in SHARES]
        plots.append(Plot(title=title, x=CACHE, y="perplexity", lines=lines, ticks=SHARES))
    return draw(plots, "Perplexity against cache before any training, of kvfold and of published rules")


def queries() -> str:
    """Return what compressed queries cost, by their rank and rule."""
    found = json.loads((RESULTS / "queries-demo.json").read_text(encoding="utf-8"))
    lines = {
        name: [(float(rank), cell["lost"]) for rank, cell in row.items() if rank.isdigit()]
        for name, row in found["rows"].items()
    }
    plot = Plot(title="queries from N numbers", x="q_lora_rank", y=LOST, lines=lines, log_x=True)
    return draw([plot], "Loss against the rank of the queries")


def metric() -> str:
    """Return what statistics and refinement gain over weights alone."""
    found = json.loads((RESULTS / "fidelity-demo.json").read_text(encoding="utf-8"))
    steps = {
        "plain SVD (mean for GQA)": {"gqa": "gqa mean", "mla": "mla svd"},
        "metric of the weights": {"gqa": "gqa, weights only", "mla": "mla, weights only"},
        "metric of statistics": {"gqa": "gqa, closed form", "mla": "mla, closed form"},
        "and refined": {"gqa": "gqa", "mla": "mla"},
    }
    plots = []
    for to in ("gqa", "mla"):
        lines = {}
        for name, rows in steps.items():
            cells = found["rows"][rows[to]]
            lines[name] = [(-float(budget.rstrip("%")), cells[budget]["lost"]) for budget in BUDGETS]
        plots.append(Plot(title=to.upper(), x=CACHE, y=LOST, lines=lines, ticks=SHARES))
    return draw(plots, "Loss against cache, by what a fold measures errors with")


def cache(folds: dict[str, Folded]) -> str:
    """Return the numbers per token and layer that a source and its folds cache."""
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]
    width = config["hidden_size"] // config["num_attention_heads"]
    rows = [("source", [(f"keys, {heads} heads", heads * width), (f"values, {heads} heads", heads * width)])]
    kept = folds["gqa"].record["target"]["num_key_value_heads"]
    rows.append(("GQA", [(f"keys, {kept}", kept * width), (f"values, {kept}", kept * width)]))
    target = folds["mla"].record["target"]
    latent, rotary = target["kv_lora_rank"], target["qk_rope_head_dim"]
    rows.append(("MLA", [(f"latent, {latent}", latent), (f"rotary key, {rotary}", rotary)]))
    counted = [(name, parts, f"{sum(number for _, number in parts)} numbers") for name, parts in rows]
    expected = folds["mla"].cache["after"]["elements_per_token_per_layer"]
    assert latent + rotary == expected
    return boxes(counted, "Numbers that a token adds to the cache of one layer")


def slots(folds: dict[str, Folded]) -> str:
    """Return the frequencies of the slots that a fold keeps, next to those of its source."""
    config = json.loads((folds["mla"].directory / "config.json").read_text(encoding="utf-8"))
    rope, width = config["rope_parameters"], config["qk_rope_head_dim"]
    source = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    head = source["hidden_size"] // source["num_attention_heads"]
    factors = rope.get("short_factor") or [1.0] * (width // 2)
    theta = rope["rope_theta"]
    kept = sorted(theta ** (-2 * place / width) / factor for place, factor in enumerate(factors))
    table = [theta ** (-2 * place / head) for place in range(head // 2)]
    counts = [
        (frequency, float(sum(math.isclose(frequency, other, rel_tol=1e-3) for other in kept)))
        for frequency in table
    ]
    lines: dict[str, list[tuple[float, float]]] = {
        "source, pairs per head": [(frequency, 1.0) for frequency in table],
        "fold, slots shared by all heads": counts,
    }
    axis = "frequency, radians per token"
    plot = Plot(
        title="slots of a frequency", x=axis, y="number", lines=lines, log_x=True, log_y=False, joined=False
    )
    return draw([plot], "Frequencies of the rotary slots that a fold keeps")


def latent(folds: dict[str, Folded]) -> str:
    """Return the predicted loss of each layer by the rank of its latent."""
    record = folds["mla"].record
    rank = record["target"]["kv_lora_rank"]
    lines = {}
    for number, layer in enumerate(record["layers"]):
        spectrum = layer["spectrum"]
        pairs = zip(spectrum["index"], spectrum["cost"], strict=True)
        lines[f"layer {number}"] = [(float(index), cost) for index, cost in pairs if cost > 1e-7]
    title = f"loss by rank (this fold: {rank})"
    plot = Plot(title=title, x="kv_lora_rank", y="predicted loss, nats", lines=lines, log_x=True)
    return draw([plot], "Predicted loss of each layer against the rank of the latent")


def layers(folds: dict[str, Folded]) -> str:
    """Return what each layer loses: predicted, measured, and after its refinement."""
    plots = []
    for to in ("gqa", "mla"):
        lines: dict[str, list[tuple[float, float]]] = {}
        for number, layer in enumerate(folds[to].record["layers"]):
            if layer["planned"]:
                planned = sum(layer["planned"].values())
                lines.setdefault("predicted", []).append((float(number), planned))
            lines.setdefault("folded", []).append((float(number), layer["measured"]["folded"]))
            lines.setdefault("refined", []).append((float(number), layer["measured"]["refined"]))
        plots.append(
            Plot(
                title=to.upper(),
                x="layer",
                y=LOST,
                lines=dict(sorted(lines.items(), reverse=True)),
            )
        )
    return draw(plots, "Loss of each layer alone: predicted, after the closed form, and refined")


def make(out: Path, sequences: int, length: int, refine: int) -> None:
    """Make every figure.

    Args:
        out: the directory for the figures.
        sequences: calibration sequences of the folds.
        length: tokens of each.
        refine: steps of their refinement.
    """
    out.mkdir(parents=True, exist_ok=True)
    for figure in (overview, queries, metric):
        (out / f"{figure.__name__}.svg").write_text(figure(), encoding="utf-8")
    given: Any = {"sequences": sequences, "length": length, "effort": "best", "refine": refine}
    with tempfile.TemporaryDirectory() as work:
        folds = {
            "gqa": kvfold.fold(DEMO, kvfold.GQA(kv_budget="25%"), out=Path(work, "gqa"), **given),
            "mla": kvfold.fold(DEMO, kvfold.MLA(kv_budget="25%"), out=Path(work, "mla"), **given),
        }
        for drawn in (cache, slots, latent, layers):
            (out / f"{drawn.__name__}.svg").write_text(drawn(folds), encoding="utf-8")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=FIGURES, help="Directory for the figures.")
@click.option("--quick", is_flag=True, help="Fold on less text.")
def main(out: Path, quick: bool) -> None:
    """Make the figures of the documentation."""
    make(out, *((2, 32, 2) if quick else (24, 256, 50)))
    click.echo(f"{out}: {', '.join(sorted(path.name for path in out.glob('*.svg')))}")


if __name__ == "__main__":
    main()
