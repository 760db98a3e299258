"""A distillation killed by `kill -9` at random moments, and gone on with: `python -m benchmarks.kills
[RECIPE] --kills 20`.

The recipe is run once without interruption, and once more for every kill: killed, given again until it ends,
and compared with
the first run bit for bit: every safetensors file of the output, the hashes of weights and optimizer in every
training state that was seen on the way, every number of metrics.jsonl and curve.json but speed and memory.

Half of the moments are drawn evenly over the time that the first run took, start and clean-up included. The
other half are
aimed at what takes too little time to be hit so: up to 30 ms after one of the things that could be seen in
the directory of the first run (MOMENTS), such as a training state that is being written or the directory of
the final export.

Needs the recipe's student; for the default, benchmarks/kills.yaml, that is the README's fold of recipes/demo.
Exit code 3 where anything differs.
"""

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click

from kvfold.core.console import Command, show_json, show_table
from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.explain import validate
from kvfold.eval.assertions import Unmet

from .killed_runs import Aim, Attempt, Seen, differences, run
from .machine import machine, save

RECIPE = Path(__file__).with_suffix(".yaml")
AT_MOST = 0.03  # seconds after a thing was seen; it takes about as long to write a training state of the demo


def draw_aims(count: int, seed: int, whole: Seen) -> list[Aim]:
    """Moments to kill at, alternately by the clock, each in its own part of the time, and at something that
    was seen.
    """
    draw, events = random.Random(seed), whole.events
    aims = []
    for number in range(count):
        by_clock = Aim(seconds=whole.seconds * (number + draw.random()) / count)
        name = draw.choice(
            sorted({event.name for event in events})
        )  # first what, or else only what is frequent would be met
        event = draw.choice([event for event in events if event.name == name])
        aims.append(by_clock if number % 2 == 0 else Aim(seconds=draw.uniform(0, AT_MOST), event=event))
    return aims


def try_once(number: int, aim: Aim, recipe: Recipe, work: Path, whole: Attempt) -> dict[str, Any]:
    """Kill a run, go on until it ends, and compare; a row of the table."""
    place = work / f"{number:03d}"
    killed = run(recipe, place, aim)
    seen, starts = killed.seen, 1
    resumed = killed
    while resumed.code == -9:  # of the killed one; what goes on is not killed again
        resumed, starts = run(recipe, place, None), starts + 1
        seen = seen.joined(resumed.seen)
    found = (
        [f"exit code {resumed.code}: {resumed.said}"] if resumed.code else differences(whole, resumed, seen)
    )
    return {
        "number": number,
        "aim": aim.told(),
        "killed_after_seconds": round(killed.seen.seconds, 2) if killed.code == -9 else None,
        "last_seen": killed.seen.last(),
        "starts": starts,
        "states_compared": len(seen.states),
        "identical": not found,
        "differences": found,
    }


@click.command(cls=Command)
@click.argument("recipe", type=click.Path(path_type=Path), default=RECIPE)
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="As for `kvfold distill`.")
@click.option("--name", help="Keep the result in benchmarks/results/NAME.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(
    recipe: Path, kills: int, seed: int, overrides: tuple[str, ...], name: str | None, as_json: bool
) -> None:
    """Kill a distillation at random moments; see whether it ends in the same bits each time."""
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        work = Path(directory)
        asked, _ = validate(recipe, [*overrides, f"output={work / 'none'}"])
        whole = run(asked, work / "whole", None)
        if whole.code:
            raise InvalidInput(f"the recipe does not run: {whole.said}")
        click.echo(
            f"uninterrupted: {whole.seen.seconds:.1f} s, {len(whole.seen.states)} training states", err=True
        )
        rows = []
        for number, aim in enumerate(draw_aims(kills, seed, whole.seen), 1):
            rows.append(try_once(number, aim, asked, work, whole))
            click.echo(
                f"{number} of {kills}: {rows[-1]['aim']}, "
                f"{'identical' if rows[-1]['identical'] else 'DIFFERS'}",
                err=True,
            )
    moments = dict(Counter(event.name for event in whole.seen.events))
    result = {
        "machine": machine(),
        "recipe": asked.resolved(),
        "seed": seed,
        "seconds": whole.seen.seconds,
        "moments": moments,
    }
    result |= {"kills": rows, "identical": sum(row["identical"] for row in rows)}
    if name:
        save(name, {key: value for key, value in result.items() if key != "machine"})
    if as_json:
        show_json(result)
    else:
        show(rows)
    if result["identical"] < kills:
        raise Unmet(
            f"{kills - result['identical']} of {kills} killed runs ended otherwise than the one that was not"
        )


def show(rows: list[dict[str, Any]]) -> None:
    """Print a line for every kill."""
    lines = [
        (
            str(row["number"]),
            row["aim"],
            "ended before" if row["killed_after_seconds"] is None else f"{row['killed_after_seconds']:.1f} s",
            row["last_seen"],
            str(row["starts"]),
            str(row["states_compared"]),
            "yes" if row["identical"] else "; ".join(row["differences"]),
        )
        for row in rows
    ]
    show_table(
        "kill -9", ("", "aimed at", "killed after", "last seen", "starts", "states", "identical"), lines
    )


if __name__ == "__main__":
    main()
