"""`kvfold distill`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..convert.console import Command, show_json, show_table
from .display import is_main_process

if TYPE_CHECKING:
    from .recipe import Recipe


@click.command("distill", cls=Command)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. --set stages.0.lr=1e-4.")
@click.option("--dry-run", is_flag=True, help="Check the recipe, show it with its steps and tokens, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def main(recipe: Path, overrides: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Train a converted checkpoint against its source, as RECIPE (YAML) says.

    The same command goes on where a run was stopped. For several GPUs: accelerate launch -m kvfold.distill RECIPE.
    """
    from .recipe_file import read_recipe

    read = read_recipe(recipe, overrides)
    if dry_run:
        _show_plan(read, as_json)
    else:
        _run(read, as_json)


def _run(recipe: "Recipe", as_json: bool) -> None:
    from .job import distill
    from .loop import Interrupted

    try:
        result = distill(recipe)
    except Interrupted as stop:
        if is_main_process():
            click.echo(f"Interrupted: {stop}; run the same command again to go on from there.", err=True)
        sys.exit(128 + stop.signum)
    if not is_main_process():
        return
    if as_json:
        show_json(result)
        return
    ends = [
        (stage["name"], name, stage["first"][name], stage["last"][name]) for stage in result["stages"] for name in stage["last"]
    ]
    rows = [(stage, name, f"{first:.4f}", f"{last:.4f}") for stage, name, first, last in ends]
    show_table(f"{result['steps']} steps, {result['tokens']:,} tokens", ("stage", "loss", "first step", "last tenth"), rows)
    click.echo(f"Wrote {result['output']}. Next: kvfold eval {result['output']} --text FILE")


def _show_plan(recipe: "Recipe", as_json: bool) -> None:
    stages = [
        {
            "name": stage.name,
            "steps": recipe.steps(stage),
            "tokens": recipe.steps(stage) * recipe.step_windows(stage) * recipe.data.seq_len,
        }
        for stage in recipe.stages
    ]
    if as_json:
        show_json({"recipe": recipe.resolved(), "stages": stages})
        return
    import yaml

    click.echo(yaml.safe_dump(recipe.resolved(), sort_keys=False), nl=False)
    rows = [(str(stage["name"]), f"{stage['steps']:,}", f"{stage['tokens']:,}") for stage in stages]
    show_table("What it will do", ("stage", "steps", "tokens"), rows)
