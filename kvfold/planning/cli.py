"""`kvfold plan`.

Which targets fit a memory at a context and batch, what each costs and loses, and which to take.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..convert.cli import command_line
from ..core.console import Command, notice, show_json, show_table
from ..core.errors import InvalidInput
from ..core.units import read_size, show_bytes

if TYPE_CHECKING:
    from ..convert.calibration.statistics import Statistics
    from ..convert.families.source import Source
    from .advice import Advice, Bounds, Row
    from .candidates import Candidate
    from .loss_curve import LossPoint

UNFIT = 3  # exit code where nothing fits: an answer, and no mistake


@click.command("plan", cls=Command)
@click.argument("model")
@click.option(
    "--context", default="32k", show_default=True, metavar="TOKENS", help="Of each sequence: 8192 or 8k."
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option(
    "--memory", metavar="SIZE", help="For weights, cache and activations: 24GB or 24GiB. Default: unbounded."
)
@click.option(
    "--quality", "goal", flag_value="quality", default="quality", help="Least predicted loss first (default)."
)
@click.option(
    "--speed",
    "goal",
    flag_value="speed",
    help="Fewest bytes moved per decoded token first, within --tolerance.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Of --speed: most predicted loss, nats per token; by weights alone, a share of attention's output.",
)
@click.option(
    "--engine",
    metavar="NAME,...",
    help="Engines that must run it: transformers, vllm, sglang, llama.cpp. Default: any.",
)
@click.option(
    "--budgets", metavar="SHARE,...", help="Shares of the source's cache to try for MLA, e.g. 50%,25%."
)
@click.option(
    "--calibration",
    metavar="self|none|FILE|DATASET",
    help="Text that losses are predicted on, as of `kvfold convert`, or saved statistics (.safetensors). "
    "Default: none, the weights alone, which ranks roughly.",
)
@click.option(
    "--layerwise/--no-layerwise",
    default=None,
    help="Take statistics one layer at a time; default: where it must.",
)
@click.option(
    "--sequences", type=click.IntRange(min=1), default=48, show_default=True, help="Calibration sequences."
)
@click.option("--length", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of each.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the calibration.")
@click.option(
    "--save-statistics",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep the statistics (.safetensors).",
)
@click.option(
    "--curve",
    is_flag=True,
    help="Also predicted loss against cache, for every target whether it fits or not.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the curve (matplotlib).",
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(model: str, goal: Literal["quality", "speed"], as_json: bool, **options: Any) -> None:
    """Find the best target for MODEL (a directory or a Hub id) in a memory, at a context and batch.

    Nothing is written. Targets are GQA at every divisor, MQA, and MLA at shares of the cache. Exit code 3:
    none of them fits.
    """
    from ..convert.families.source import open_source
    from ..core.hub import resolve
    from .advice import place, predict_rows, rank

    bounds, shares, calibration = _read(options)
    source = open_source(resolve(model, options["revision"]))
    candidates, refused = _find(source, shares, options["engine"], calibrated=calibration != "none")
    rows = [place(candidate, bounds) for candidate in candidates]
    every = options["curve"] or options["png"] is not None
    statistics = _study(source, calibration, options) if every or any(row.fits for row in rows) else None
    rows = predict_rows(rows, bounds, statistics, every=every)
    advice = rank(rows, bounds, goal, options["tolerance"], calibrated=statistics is not None)
    commands = _Commands(model, options["revision"], _calibration_options(calibration, options))
    report = _report(source, advice, refused, commands, statistics)
    if every:
        report["curve"] = _curve(rows, advice.unit, model, options["png"])
    _warn(source, bounds, calibration, refused, as_json)
    if as_json:
        show_json(report)
    else:
        _show(report, advice)
    if advice.chosen is None:
        sys.exit(UNFIT)


class _Commands:
    """The `kvfold convert` command of each row."""

    def __init__(self, model: str, revision: str | None, calibration: dict[str, Any]) -> None:
        self._model = model
        self._revision = revision
        self._calibration = calibration

    def of(self, row: "Row") -> str:
        one = row.candidate
        given = {**one.options, **self._calibration}
        return command_line(self._model, one.to, given, one.plan.method, self._revision, "auto")


def _read(options: dict[str, Any]) -> tuple["Bounds", tuple[str, ...], str]:
    """Return bounds, shares and calibration, and refuse what cannot be done before any work."""
    from . import candidates
    from . import loss_curve as curve
    from .advice import Bounds

    memory = options["memory"]
    bounds = Bounds(
        context=read_size(options["context"], "--context", "tokens"),
        batch=options["batch"],
        memory=None if memory is None else read_size(memory, "--memory", "bytes"),
    )
    if options["png"] is not None:
        curve.check_picture(options["png"])
    shares = curve.SHARES if options["curve"] or options["png"] else candidates.SHARES
    if options["budgets"] is not None:
        shares = tuple(dict.fromkeys(share.strip() for share in options["budgets"].split(",")))
    return bounds, shares, options["calibration"] or ("self" if options["save_statistics"] else "none")


def _find(
    source: "Source", shares: tuple[str, ...], engine: str | None, *, calibrated: bool
) -> tuple[list["Candidate"], dict[str, str]]:
    from .candidates import find_candidates

    candidates, refused = find_candidates(source, shares, engine, calibrated=calibrated)
    if not candidates:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in refused.items())
        raise InvalidInput(
            f"there is no target with a smaller cache for this source: "
            f"{reasons or 'it has one key/value head'}"
        )
    return candidates, refused


def _study(source: "Source", calibration: str, options: dict[str, Any]) -> "Statistics | None":
    from ..convert.calibration.study import study

    taken = {key: options[key] for key in ("sequences", "length", "seed", "layerwise")}
    return study(source, calibration, **taken, save=options["save_statistics"])


def _calibration_options(calibration: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the calibration options of `convert`: those used here.

    Where weights alone were used, they are its own defaults.
    """
    if calibration == "none":
        return {}
    if options["save_statistics"] is not None:
        return {"calibration": str(options["save_statistics"])}
    if calibration.endswith(".safetensors"):
        return {"calibration": calibration}
    return {"calibration": calibration, **{key: options[key] for key in ("sequences", "length", "seed")}}


def _report(
    source: "Source",
    advice: "Advice",
    refused: dict[str, str],
    commands: _Commands,
    statistics: "Statistics | None",
) -> dict[str, Any]:
    from .advice import place, what_would_fit
    from .candidates import plan_source

    bounds = advice.bounds
    unchanged = plan_source(source)
    own = None if unchanged is None else place(unchanged, bounds).to_dict()
    chosen = advice.chosen
    return {
        "source": str(source.checkpoint.directory),
        "family": source.family.label,
        "context": bounds.context,
        "batch": bounds.batch,
        "memory": bounds.memory,
        "goal": advice.goal,
        "unit": "share of attention's output, by weights alone"
        if statistics is None
        else "nats per token, before refinement",
        "calibration": None
        if statistics is None
        else {"text": statistics.calibration, "tokens": statistics.tokens},
        "unchanged": own and {key: own[key] for key in ("cache", "parameters", "memory", "fits", "decode")},
        "candidates": [{**row.to_dict(), "command": commands.of(row)} for row in advice.rows],
        "refused": refused,
        "chosen": chosen
        and {"label": chosen.candidate.label, "reason": advice.reason, "command": commands.of(chosen)},
        "would_fit": None if chosen else what_would_fit(advice.rows, bounds),
    }


def _curve(rows: list["Row"], unit: str, model: str, png: Path | None) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from .loss_curve import draw, points_of

    points: list[LossPoint] = points_of(rows)
    if png is not None:
        if not points:
            raise InvalidInput(
                f"--png {png}: no loss of this source's attention can be predicted, so there is nothing "
                "to draw"
            )
        draw(points, unit, f"predicted loss of {Path(model).name or model}", png)
    return [asdict(point) for point in points]


def _warn(
    source: "Source", bounds: "Bounds", calibration: str, refused: dict[str, str], as_json: bool
) -> None:
    if bounds.context > source.positions:
        notice(f"--context {bounds.context} exceeds the source's max_position_embeddings, {source.positions}")
    if calibration == "none":
        notice(
            "losses are predicted from the weights alone; --calibration self or saved statistics rank far "
            "better"
        )
    for kind in () if as_json else ("gqa", "mla decoupled", "mla intact"):
        if kind in refused:
            notice(f"no {kind}: {refused[kind]}")


def _show(report: dict[str, Any], advice: "Advice") -> None:
    limit = "any memory" if report["memory"] is None else show_bytes(report["memory"])
    title = (
        f"{report['source']} ({report['family']}) at {report['context']:,} tokens x {report['batch']} "
        f"in {limit}"
    )
    rows = [_cells(row) for row in report["candidates"]]
    if report["unchanged"] is not None:
        rows.append(
            _cells({**report["unchanged"], "label": "(the source)", "predicted_loss": 0.0, "engines": {}})
        )
    loss = "nats lost, --refine 0" if report["calibration"] else "error, by weights"
    columns = (
        "",
        "cache",
        "",
        "parameters",
        "memory",
        "fits",
        loss,
        "bytes per token",
        "attention FLOPs",
        "engines",
    )
    show_table(title, columns, rows)
    if "curve" in report:
        lines = [(p["line"], p["label"], f"{p['share']:.1%}", f"{p['loss']:.4f}") for p in report["curve"]]
        show_table("predicted loss against cache", ("", "", "cache", loss), lines)
    if report["unchanged"] and report["unchanged"]["fits"]:
        notice("the source itself fits")
    if report["chosen"]:
        click.echo(
            f"{report['chosen']['label']}: {report['chosen']['reason']}\n{report['chosen']['command']}"
        )
    else:
        click.echo(f"Nothing fits. {_would_fit(report['would_fit'], advice.bounds)}")


def _cells(row: dict[str, Any]) -> list[str]:
    cache, decode = row["cache"], row["decode"]
    loss = "" if row["predicted_loss"] is None else f"{row['predicted_loss']:.4f}"
    return [
        row["label"],
        f"{cache.get('share', 1.0):.1%}",
        show_bytes(row["memory"]["cache"]),
        f"{row['parameters'] / 1e6:,.4g} M",
        show_bytes(row["memory"]["total"]),
        "yes" if row["fits"] else "no",
        loss,
        f"{show_bytes(decode['bytes'])} {decode['form']}",
        f"{decode['attention_flops']:.3g}",
        ", ".join(name for name, reason in row["engines"].items() if not reason),
    ]


def _would_fit(found: dict[str, Any], bounds: "Bounds") -> str:
    """Return a sentence on the least that would have to change."""
    ways = [f"--memory {-(-found['memory'] // 10**6)}MB ({found['label']})"]
    if found["context"]:
        ways.append(f"--context {found['context']} at a batch of {bounds.batch} ({found['context_label']})")
    if found["batch"]:
        ways.append(f"--batch {found['batch']} at {bounds.context:,} tokens ({found['batch_label']})")
    return f"What would: {' or '.join(ways)}"
