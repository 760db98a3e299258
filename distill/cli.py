"""The command `kvfold distill`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ..core.console import Command, is_first, notice, show_json, show_table, show_text
from ..core.errors import InvalidInput
from .display import LOSS_COLUMNS, duration, loss_rows, wait_for_rank_0
from .recipe.recipe import Profile

if TYPE_CHECKING:
    from .recipe.recipe import Recipe


RECIPE = click.argument("recipe", type=click.Path(path_type=Path), metavar="RECIPE|FOLD")
OVERRIDES = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, such as --set stages.0.lr=1e-4.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


@click.command("validate", cls=Command)
@click.argument("recipes", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RECIPE|FOLD...")
@OVERRIDES
@JSON
def validate(recipes: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Check recipes, and the models and texts that they name on this machine.

    The first documents of each text are read: that they can be read and have the named field, how many tokens
    there are, and whether the held-out text is among them. The exit code is 2 if a recipe is wrong.
    """
    from .run.explain import validate as check

    mistakes: dict[str, str | None] = {}
    notes: dict[str, list[str]] = {}
    for recipe in recipes:
        try:
            notes[str(recipe)] = check(recipe, overrides)
            mistakes[str(recipe)] = None
        except InvalidInput as mistake:
            mistakes[str(recipe)] = str(mistake)
    if as_json:
        show_json({"recipes": mistakes, "notes": notes})
    else:
        for name, found in mistakes.items():
            for sentence in notes.get(name, ()):
                notice(sentence)
            if found is None:
                show_text(f"{name}: valid")
            else:
                click.echo(f"Error: {found}", err=True)
    sys.exit(2 if any(mistakes.values()) else 0)


@click.command("explain", cls=Command)
@RECIPE
@OVERRIDES
@click.option("--processes", type=click.IntRange(min=1), help="Number of processes; by default one per GPU.")
@JSON
def explain(recipe: Path, overrides: tuple[str, ...], processes: int | None, as_json: bool) -> None:
    """Show the meaning and origin of every key of RECIPE, and what each stage trains and takes.

    For FOLD, an output of `kvfold convert`, it shows the recipe that `kvfold distill FOLD` uses.

    Memory is an estimate for one process; --set profile=fsdp2 --processes 8 divides the models among eight.
    Time is a lower bound: the arithmetic at the rate of this machine's matrix products.
    """
    from .run.explain import explain as explained

    result = explained(recipe, overrides, processes)
    if as_json:
        show_json(result)
        return
    words = {None: "null", True: "true", False: "false"}
    rows = []
    for key in result["keys"]:
        value = key["value"]
        text = words[value] if value is None or isinstance(value, bool) else str(value)
        rows.append((key["key"], text, key["from"], key["meaning"]))
    show_table("Every key", ("key", "", "from", ""), rows)
    show_table("Stages", STAGE_COLUMNS, [_stage_row(stage) for stage in result["stages"]])
    for stage in result["stages"]:
        found = stage["footprint"]
        if found:
            memory = {purpose: f"{size / 2**30:.2f}" for purpose, size in found["memory_bytes"].items()}
            count = found["processes"]
            which = "one process" if count == 1 else f"each of {count} processes"
            show_table(f"{stage['name']}: memory of {which}, GiB", tuple(memory), [tuple(memory.values())])
    if result["note"]:
        show_text(f"Memory and time are not shown: {result['note']}.")


STAGE_COLUMNS = ("stage", "mode", "losses", "trains", "steps", "tokens per step", "tokens", "takes at least")


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    found = stage["footprint"]
    losses = " + ".join(f"{weight:g} {name}" for name, weight in stage["losses"].items())
    trained = stage["train"]
    time = "?"
    if found:
        trained += f": {found['trained']:,} of {found['weights']:,}"
        if found["seconds_at_least"] is not None:
            time = duration(found["seconds_at_least"])
    numbers = (f"{stage[key]:,}" for key in ("steps", "step_tokens", "tokens"))
    return stage["name"], stage["mode"], losses, trained, *numbers, time


OTHERS = {"validate": validate, "explain": explain}


class _Distill(Command):
    """The command `distill`, which becomes another one if its first word is `validate` or `explain`.

    A recipe of such a name is given as `./validate`.
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
            wait_for_rank_0()
            raise


@click.command("distill", cls=_Distill)
@RECIPE
@OVERRIDES
@click.option(
    "--profile",
    type=click.Choice(get_args(Profile)),
    help="How processes divide the run: whole copies of the models (ddp), or shards (fsdp2, zero2, zero3; by "
    "FSDP 2, not DeepSpeed). Arguments after -- are passed to accelerate.",
)
@click.argument("launcher", nargs=-1, type=click.UNPROCESSED, metavar="[-- ACCELERATE...]")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check the recipe and what it names, as validate does, show it with its steps and tokens, and stop.",
)
@JSON
def main(
    recipe: Path,
    overrides: tuple[str, ...],
    profile: Profile | None,
    launcher: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train a converted checkpoint against its source, as RECIPE (YAML) says.

    Given FOLD, an output of `kvfold convert`, it trains on text that the source writes; the output is
    FOLD-distilled. --set data.source=FILE trains on your own text.

    `distill validate RECIPE...` checks recipes. `distill explain RECIPE` shows the meaning of each key and
    what the run takes.

    The same command resumes a run that was stopped. For several GPUs, use --profile ddp if the models fit on
    one GPU and --profile fsdp2 if they do not, or accelerate launch -m kvfold.distill RECIPE.
    """
    from .parallel.launch import check_launched, is_launched, relaunch
    from .recipe.recipe_file import as_recipe

    read = as_recipe(recipe, overrides=overrides)
    profile = profile or read.profile
    if launcher and (not profile or not launcher[0].startswith("-")):
        raise InvalidInput(
            f"unexpected argument {launcher[0]}; put accelerate arguments after `--`, together with --profile"
        )
    if dry_run:
        _show_plan(read.model_copy(update={"profile": profile}), as_json)
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

    result = distill(recipe)
    if not is_first():
        return
    if as_json:
        show_json(result.to_dict())
        return
    show_table(f"{result.steps} steps, {result.tokens:,} tokens", LOSS_COLUMNS, loss_rows(result.stages))
    found = result.evaluation
    if found:
        share = "" if found["recovered_share"] is None else f", {found['recovered_share']:.1%} recovered"
        show_text(
            f"Held-out text ({found['text']}): perplexity {found['teacher_perplexity']:.4g} (teacher), "
            f"{found['start_perplexity']:.4g} (at first), {found['perplexity']:.4g} (after step "
            f"{found['step']}){share}."
        )
        if found["kept"] == "start":
            notice(
                "no trained weights are better than the start on held-out text, so the output has the "
                "start's weights; use a lower lr or more tokens"
            )
        elif found["perplexity"] > found["start_perplexity"]:
            notice(
                "training made the student worse on held-out text; use a lower lr, more tokens, or "
                "evaluate.keep: best"
            )
    done = f"Wrote {result.output}"
    if not result.is_new:
        done = f"Nothing was trained or written: {result.output} is complete already, and this is its result"
    show_text(f"{done}. Next: kvfold eval {shlex.quote(str(result.output))} --text FILE")


def _show_plan(recipe: "Recipe", as_json: bool) -> None:
    from .run.explain import check_places
    from .run.resume import complete, find_result

    output = recipe.output_directory
    found = find_result(recipe, output)  # the run may have ended before
    for sentence in check_places(recipe) if found is None else [complete(output)]:
        notice(sentence)
    stages = []
    for stage in recipe.stages:
        steps = recipe.steps(stage)
        stages.append({"name": stage.name, "steps": steps, "tokens": steps * recipe.step_tokens(stage)})
    if as_json:
        show_json({"recipe": recipe.resolved(), "stages": stages})
        return
    import yaml

    show_text(yaml.safe_dump(recipe.resolved(), sort_keys=False))
    rows = [(str(stage["name"]), f"{stage['steps']:,}", f"{stage['tokens']:,}") for stage in stages]
    show_table("Stages", ("stage", "steps", "tokens"), rows)
