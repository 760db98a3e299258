"""`kvfold plan`.

Which targets fit a memory at a context and batch, what each costs and loses, and which to take.
"""

import sys
from typing import Any

import click

from ..core.command_options import read_options, takes
from ..core.console import Command, notice, show_json, show_table, show_text
from .request import PlanRequest

UNFIT = 3  # exit code where nothing fits: an answer, and no mistake


@click.command("plan", cls=Command)
@click.argument("model")
@takes(PlanRequest, without=("model", "goal"))
@click.option("--quality", "goal", flag_value="quality", help="Least predicted loss first.  [default]")
@click.option(
    "--speed",
    "goal",
    flag_value="speed",
    help="Fewest bytes moved per decoded token first, within --tolerance.",
)
@click.option("--all", "every", is_flag=True, help="Also list the targets that do not fit.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables, with all targets."
)
def main(every: bool, as_json: bool, **options: Any) -> None:
    """List the targets for MODEL (a directory or a Hub id) that fit a memory, at a context and batch.

    The best comes first. Nothing is written. Targets are GQA at every divisor, MQA, and MLA at shares of the
    cache. Exit code 3: none of them fits.
    """
    from .recommendation import recommend

    found = recommend(read_options(PlanRequest, options))
    if as_json:
        show_json(found.report)
    else:
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
            notice(
                f"targets that do not fit are left out ({count - len(found)} of {count}); --all lists them"
            )
        if "curve" in found.report:
            points = found.report["curve"]
            lines = [(p["line"], p["label"], f"{p['share']:.1%}", f"{p['loss']:.4f}") for p in points]
            show_table("predicted loss against cache", ("", "", "cache", found.loss_heading), lines)
        if found.report["unchanged"] and found.report["unchanged"]["fits"]:
            notice("the source itself fits")
        show_text(found.advice)
    if found.chosen is None:
        sys.exit(UNFIT)
