"""`kvfold distill`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.console import Command, notice, show_json, show_table
from ..core.errors import InvalidInput
from .watch.display import duration, is_main_process, let_first_speak

if TYPE_CHECKING:
    from .recipe.recipe import Profile, Recipe


OVERRIDES = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, e.g. --set stages.0.lr=1e-4.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


@click.command("validate", cls=Command)
@click.argument("recipes", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RECIPE...")
@OVERRIDES
@JSON
def validate(recipes: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Check recipes, and the models and texts on this machine which they name; exit code 2 if one is wrong.

    Of texts the first documents are read: whether they can be, whether the named field is there, about how
    many tokens there are, and whether the held-out text is among them.
    """
    from .run.explain import validate as check

    mistakes: dict[str, str | None] = {}
    notes: dict[str, list[str]] = {}
    for recipe in recipes:
        try:
            notes[str(recipe)] = check(recipe, overrides)[1]
            mistakes[str(recipe)] = None
        except InvalidInput as mistake:
            mistakes[str(recipe)] = str(mistake)
    if as_json:
        show_json({"recipes": mistakes, "notes": notes})
    for name, found in () if as_json else mistakes.items():
        for sentence in notes.get(name, ()):
            notice(sentence)
        click.echo(f"{name}: valid" if found is None else f"Error: {found}", err=found is not None)
    sys.exit(2 if any(mistakes.values()) else 0)


@click.command("explain", cls=Command)
@click.argument("recipe", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--processes", type=click.IntRange(min=1), help="How many share the run; by default one a GPU.")
@JSON
def explain(recipe: Path, overrides: tuple[str, ...], processes: int | None, as_json: bool) -> None:
    """Say what every key of RECIPE is and where its value comes from, and what each stage trains, does and
    takes.

    Memory is an estimate for one process, of which --set profile=fsdp2 --processes 8 would share the models;
    the time is what the arithmetic alone would take at the rate of this machine's matrix products, so that no
    run is quicker.
    """
    from .run.explain import explain as explained

    result = explained(recipe, overrides, processes)
    if as_json:
        show_json(result)
        return
    from rich.markup import escape  # what stands in brackets is no style

    rows = [
        tuple(map(escape, (key["key"], _written(key["value"]), key["from"], key["meaning"])))
        for key in result["keys"]
    ]
    show_table("Every key", ("key", "", "from", ""), rows)
    show_table("What it will do", STAGE_COLUMNS, [_stage_row(stage) for stage in result["stages"]])
    for stage in result["stages"]:
        if stage["footprint"]:
            memory = {
                name: f"{size / 2**30:.2f}" for name, size in stage["footprint"]["memory_bytes"].items()
            }
            which = (
                "one process"
                if (count := stage["footprint"]["processes"]) == 1
                else f"each of {count} processes"
            )
            show_table(f"{stage['name']}: memory of {which}, GiB", tuple(memory), [tuple(memory.values())])
    if result["note"]:
        click.echo(f"Memory and time are not told: {result['note']}.")


STAGE_COLUMNS = ("stage", "mode", "losses", "trains", "steps", "tokens a step", "tokens", "takes at least")


def _written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    found = stage["footprint"]
    losses = " + ".join(f"{weight:g} {name}" for name, weight in stage["losses"].items())
    share = f": {found['trained']:,} of {found['weights']:,}" if found else ""
    time = duration(found["seconds_at_least"]) if found and found["seconds_at_least"] is not None else "?"
    numbers = (f"{stage[key]:,}" for key in ("steps", "step_tokens", "tokens"))
    return stage["name"], stage["mode"], losses, f"{stage['train']}{share}", *numbers, time


OTHERS = {"validate": validate, "explain": explain}


class _Distill(Command):
    """With `validate` or `explain` as its first word it is that command.

    A recipe of such a name is `./validate`.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in OTHERS:
            return OTHERS[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.command is not self:
            return ctx.command.invoke(ctx)
        try:
            return super().invoke(ctx)
        except click.ClickException:
            let_first_speak()
            raise


@click.command("distill", cls=_Distill)
@click.argument("recipe", type=click.Path(path_type=Path))
@OVERRIDES
@click.option(
    "--profile",
    type=click.Choice(["cpu", "single", "ddp", "fsdp2", "zero2", "zero3", "multinode"]),
    help="How processes share the run: whole copies (ddp), or shards (fsdp2, zero2, zero3: by FSDP 2, not "
    "DeepSpeed). What "
    "follows -- goes to accelerate.",
)
@click.argument("launcher", nargs=-1, type=click.UNPROCESSED, metavar="[-- ACCELERATE...]")
@click.option(
    "--dry-run", is_flag=True, help="Check the recipe, show it with its steps and tokens, and stop."
)
@JSON
def main(
    recipe: Path,
    overrides: tuple[str, ...],
    profile: "Profile | None",
    launcher: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train a converted checkpoint against its source, as RECIPE (YAML) says.

    `distill validate RECIPE...` checks recipes, and `distill explain RECIPE` says what each key is and what
    the run takes.

    The same command goes on where a run was stopped. For several GPUs: --profile ddp where the models fit on
    one, --profile fsdp2 where they do not, or accelerate launch -m kvfold.distill RECIPE.
    """
    from .parallel.launch import check_launched, is_launched, relaunch
    from .recipe.recipe_file import read_recipe

    read = read_recipe(recipe, overrides)
    profile = profile or read.profile
    if launcher and (not profile or not launcher[0].startswith("-")):
        raise InvalidInput(
            f"{launcher[0]} is for nobody: arguments for accelerate need --profile, and -- before them"
        )
    if dry_run:
        _show_plan(read, as_json)
        return
    check_launched()
    if profile and not is_launched():
        from .run.explain import check_before_launch

        check_before_launch(read.model_copy(update={"profile": profile}))
        settings = [word for override in overrides for word in ("--set", override)]
        relaunch(read, profile, launcher, [str(recipe), *settings, *(["--json"] if as_json else [])])
    _run(read.model_copy(update={"device": "cpu"}) if profile == "cpu" else read, as_json)


def _run(recipe: "Recipe", as_json: bool) -> None:
    from .run.job import distill
    from .stages.loop import Interrupted

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
        (stage["name"], name, stage["first"][name], stage["last"][name])
        for stage in result["stages"]
        for name in stage["last"]
    ]
    rows = [(stage, name, f"{first:.4f}", f"{last:.4f}") for stage, name, first, last in ends]
    show_table(
        f"{result['steps']} steps, {result['tokens']:,} tokens",
        ("stage", "loss", "first step", "last tenth"),
        rows,
    )
    if found := result.get("evaluation"):
        share = "" if found["recovered_share"] is None else f", {found['recovered_share']:.1%} recovered"
        click.echo(
            f"Held-out text ({found['text']}): perplexity {found['teacher_perplexity']:.4g} (teacher), "
            f"{found['start_perplexity']:.4g} (before), {found['perplexity']:.4g} (after step "
            f"{found['step']}){share}."
        )
        if found["kept"] == "start":
            notice(
                "no trained weights beat the start on held-out text, so it has the start's; use a lower "
                "lr or more tokens"
            )
        elif found["perplexity"] > found["start_perplexity"]:
            notice(
                "training made it worse on held-out text; use a lower lr or more tokens, or "
                "evaluate.keep: best"
            )
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
