"""`kvfold plan`.

Which targets fit a memory at a context and batch, what each costs and loses, and which to take.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..convert.decide.engines import ENGINES
from ..core.cache_dtypes import CACHE_DTYPES
from ..core.console import Command, notice, show_json, show_table
from ..core.units import read_size

if TYPE_CHECKING:
    from .recommendation import Candidates

UNFIT = 3  # exit code where nothing fits: an answer, and no mistake


@click.command("plan", cls=Command)
@click.argument("model")
@click.option(
    "--context",
    metavar="TOKENS",
    help="Of each sequence: 8192 or 8k. Default: 32k, or the source's positions where these are fewer.",
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option(
    "--memory", metavar="SIZE", help="For weights, cache and activations: 24GB or 24GiB. Default: unbounded."
)
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Tensor-parallel ranks; memory and cache are then those of one rank.",
)
@click.option(
    "--dcp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="M",
    help="Ranks of decode context parallelism among them.",
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
    "engines",
    metavar="NAME,...",
    help=f"Engines that must run it: {', '.join(ENGINES)}. Default: any.",
)
@click.option(
    "--budgets", metavar="SHARE,...", help="Shares of the source's cache to try for MLA, e.g. 50%,25%."
)
@click.option(
    "--cache-dtype",
    "cache_dtypes",
    metavar="NAME,...",
    help=f"Number formats of the cache: {', '.join(CACHE_DTYPES)}. Every target is compared in each, by its "
    "bytes and by the loss in closed-form coordinates for it; * marks those that no other beats in both.",
)
@click.option(
    "--calibration",
    metavar="self|none|stdlib|FILE|DATASET|self+FILE",
    help="Text that losses are predicted on, as of `kvfold convert`, or saved statistics (.safetensors). "
    "Default: none, the weights alone, which ranks roughly, or self with --save-statistics.",
)
@click.option(
    "--layerwise/--no-layerwise",
    default=None,
    help="Take statistics with one layer in memory at a time; by default when the model does not fit whole.",
)
@click.option(
    "--sequences", type=click.IntRange(min=1), default=48, show_default=True, help="Calibration sequences."
)
@click.option(
    "--length", type=click.IntRange(min=2), help="Tokens of each; by default as kvfold convert has it."
)
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
@click.option(
    "--text-only",
    is_flag=True,
    help="Plan the text tower of a multimodal model alone, as a causal language model; by default it is "
    "folded in its place.",
)
@click.option("--all", "every", is_flag=True, help="Also list the targets that do not fit.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables, with all targets."
)
def main(context: str | None, memory: str | None, every: bool, as_json: bool, **options: Any) -> None:
    """List the targets for MODEL (a directory or a Hub id) that fit a memory, at a context and batch.

    The best comes first. Nothing is written. Targets are GQA at every divisor, MQA, and MLA at shares of the
    cache. Exit code 3: none of them fits.
    """
    from .recommendation import PlanRequest, recommend

    found = recommend(PlanRequest.read(_settings(context, memory, options)))
    if as_json:
        show_json(found.report)
    else:
        _show(found, every=every)
    if found.chosen is None:
        sys.exit(UNFIT)


def _settings(context: str | None, memory: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `PlanRequest`, read from what the options say."""
    engines, budgets = options.pop("engines"), options.pop("budgets")
    cache_dtypes = options.pop("cache_dtypes")
    settings = dict(options)
    if context is not None:
        settings["context"] = read_size(context, "--context", "tokens")
    if memory is not None:
        settings["memory"] = read_size(memory, "--memory", "bytes")
    if engines is not None:
        settings["engines"] = tuple(engines.split(","))
    if cache_dtypes is not None:
        settings["cache_dtypes"] = tuple(name.strip() for name in cache_dtypes.split(","))
    if budgets is not None:
        settings["budgets"] = tuple(dict.fromkeys(share.strip() for share in budgets.split(",")))
    if settings["calibration"] is None:
        del settings["calibration"]
    return settings


def _show(found: "Candidates", *, every: bool) -> None:
    refused: dict[str, list[str]] = {}
    for kind in ("gqa", "mla decoupled", "mla intact"):
        if kind in found.report["refused"]:
            refused.setdefault(found.report["refused"][kind], []).append(kind)
    for why, kinds in refused.items():
        notice(f"no {' and no '.join(kinds)}: {why}")
    table = found.grid(every=every)
    show_table(table.title, table.columns, table.rows)
    count = len(found.report["candidates"])
    if len(found) < count and not every:
        notice(f"targets that do not fit are left out ({count - len(found)} of {count}); --all lists them")
    if "curve" in found.report:
        points = found.report["curve"]
        lines = [(p["line"], p["label"], f"{p['share']:.1%}", f"{p['loss']:.4f}") for p in points]
        show_table("predicted loss against cache", ("", "", "cache", found.loss_heading), lines)
    if found.report["unchanged"] and found.report["unchanged"]["fits"]:
        notice("the source itself fits")
    click.echo(found.advice)
