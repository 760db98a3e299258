"""The command `kvfold migrate`. It imports nothing heavy, since `--help` goes through it."""

import shlex
from typing import TYPE_CHECKING, Any

import click

from ..core.command_options import read_options, takes
from ..core.console import Command, show_json, show_table, show_text
from .migration_options import MigrationOptions

if TYPE_CHECKING:
    from .request import Migration


@click.command("migrate", cls=Command)
@click.argument("model")
@takes(MigrationOptions, without=("model", "settings"))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of every distillation's recipe, such as stages.0.lr=1e-4.",
)
@click.option("--dry-run", is_flag=True, help="Show the steps; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(overrides: tuple[str, ...], dry_run: bool, as_json: bool, **options: Any) -> None:
    """Find the smallest cache for MODEL that stays within a loss limit after a short distillation.

    First, a fold that keeps everything is compared with the source. Then, step by step, the source is folded
    to the next smaller cache, distilled, and evaluated on held-out text, until a step exceeds the bound.
    The smallest cache within it becomes DIR, with report.json and report.html. If none does, the
    first step becomes DIR.unmet, with exit code 3. If distillation made a step worse, its fold takes its
    place. The same command resumes a run that was killed. If no step stayed within the bound, the same
    command with another bound resumes the run. This text was used to choose the step, so report final
    numbers on another one.
    """
    from .request import read_request

    asked = read_request(read_options(MigrationOptions, options), overrides)
    if dry_run:
        _show_plan(asked, as_json)
        return
    from ..eval.assertions import Unmet
    from .steps import migrate

    report = migrate(asked)
    if as_json:
        show_json(report)
    else:
        from .migrate_call import migration_grid

        grid = migration_grid({**report, "source": asked.wanted.model})
        show_table(grid.title, grid.columns, grid.rows)
        if report["met"]:
            fold = ", the fold itself" if report["kept"] == "folded" else ""
            show_text(
                f"Wrote {asked.out} ({report['chosen']}{fold}). Next: kvfold eval "
                f"{shlex.quote(str(asked.out))} --text ANOTHER_FILE"
            )
    if not report["met"]:
        raise Unmet(
            f"no step holds {report['until']}; the nearest one, {report['chosen']}, is in {asked.unmet}; "
            "use another bound or begin --steps with a larger cache, and the same command resumes from "
            f"{asked.partial}, or use more --tokens-per-step with another --out"
        )


def _show_plan(asked: "Migration", as_json: bool) -> None:
    from .outcome import check_places
    from .steps import predict_folds

    check_places(asked)
    cost = predict_folds(asked)
    plans = [(step.name, step.plan.to_dict()) for step in asked.steps]
    if as_json:
        recipe = {
            key: value for key, value in asked.recipe.resolved().items() if key not in {"student", "output"}
        }
        steps = [{"step": name, **plan} for name, plan in plans]
        found = {"source": str(asked.source), "until": asked.bound.text, "steps": steps}
        show_json({**found, "folds": cost.to_dict(), "distillation": recipe})
        return
    rows = [
        (
            name,
            ", ".join(f"{key} {value}" for key, value in plan["target"].items() if key != "name"),
            f"{plan['cache']['after']['elements_per_token_per_layer']} ({plan['cache']['ratio']:.1%})",
            f"{sum(map(asked.recipe.steps, asked.recipe.stages)):,}",
            f"{2 * plan['output_bytes'] / 1e6:,.1f} MB",
        )
        for name, plan in plans
    ]
    columns = ("step", asked.wanted.to, "cache per token and layer", "training steps", "on disk")
    show_table(
        f"{asked.wanted.model} until {asked.bound.text} does not hold; {asked.text.name}", columns, rows
    )
    show_text(
        f"The folds take {cost} on this machine while nothing else runs; distillation and evaluation are not "
        "included"
    )
