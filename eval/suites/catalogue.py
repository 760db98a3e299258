"""What `kvfold eval --suite` may name: a table. A suite is a file of this folder and a row here; no heavy
import.

The file has `measure(subject)`, which returns what it found: a frozen dataclass of plain values, whose fields
are its block in eval.json and whose `rows(roles)` are its lines of the table; or None where the suite does
not apply. See subject.py for what it is given. It may have `check(settings)`, which refuses bad values of its
options before a model is loaded.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import click

from ...core.errors import InvalidInput
from ...core.units import ByteSize

DEFAULT = ("ppl", "fidelity", "cache")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A row of the table.

    Attributes:
        module: the file, without `.py`.
        summary: a few words for --help.
        reads_text: whether it needs --text.
        on_all_ranks: every process of a launcher takes part; otherwise rank 0 measures alone.
        options: of its own on the command line; their values come as `subject.settings`.
    """

    module: str
    summary: str
    reads_text: bool = False
    on_all_ranks: bool = False
    options: tuple[click.Option, ...] = ()


_FROM_ONE = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)

SUITES = {
    "ppl": Suite(
        module="perplexity", summary="perplexity and bits per byte", reads_text=True, on_all_ranks=True
    ),
    "fidelity": Suite(
        module="fidelity", summary="KL to the teacher, same top-1, Δp", reads_text=True, on_all_ranks=True
    ),
    "cache": Suite(
        module="cache",
        summary="elements and bytes of the KV cache",
        options=(
            click.Option(
                ["--memory"],
                type=ByteSize(),
                metavar="SIZE",
                help="cache: how many sequences fit in so much, e.g. 24GB.",
            ),
        ),
    ),
    "speed": Suite(
        module="speed",
        summary="time and memory of prefill and decode",
        options=(
            click.Option(
                ["--speed-batch"],
                metavar="N,N",
                default="1",
                show_default=True,
                help="speed: sequences at once.",
            ),
            click.Option(
                ["--speed-context"],
                metavar="N,N",
                help="speed: tokens read before.  [default: 512,4096 as far as they fit]",
            ),
            click.Option(
                ["--speed-tokens"],
                type=_FROM_ONE,
                default=16,
                show_default=True,
                help="speed: decoded each round.",
            ),
            click.Option(
                ["--speed-rounds"],
                type=click.IntRange(min=3),
                default=10,
                show_default=True,
                help="speed: at most.",
            ),
            click.Option(
                ["--speed-seconds"],
                type=click.FloatRange(min=0, min_open=True),
                default=300.0,
                show_default=True,
                help="speed: for the whole sweep; every cell begun gets 3 rounds.",
            ),
        ),
    ),
    "retrieval": Suite(
        module="retrieval",
        summary="keys found again in generated texts",
        options=(
            click.Option(
                ["--retrieval-lengths"],
                metavar="N,N",
                help="retrieval: tokens.  [default: 1/4, 1/2 and all of what the models take, at most 4096]",
            ),
            click.Option(
                ["--retrieval-depths"],
                type=_FROM_ONE,
                default=5,
                show_default=True,
                help="retrieval: from head to end.",
            ),
            click.Option(
                ["--retrieval-samples"],
                type=_FROM_ONE,
                default=10,
                show_default=True,
                help="retrieval: a cell.",
            ),
            click.Option(
                ["--retrieval-keys"],
                type=click.IntRange(2, 10),
                default=4,
                show_default=True,
                help="retrieval: in a text, of which one is asked for.",
            ),
            click.Option(
                ["--retrieval-seed"], type=int, default=0, show_default=True, help="retrieval: of the texts."
            ),
        ),
    ),
    "tasks": Suite(
        module="tasks",
        summary="benchmarks of lm-evaluation-harness",
        options=(
            click.Option(
                ["--tasks"],
                metavar="NAME,NAME",
                default="mla-core",
                show_default=True,
                help="tasks: of lm-evaluation-harness; mla-core: ARC, HellaSwag, PIQA, WinoGrande, "
                "OpenBookQA, BoolQ, MMLU.",
            ),
            click.Option(
                ["--task-path"],
                type=_PATH,
                metavar="DIR",
                help="tasks: where your own are, as its YAML; their code runs.",
            ),
            click.Option(
                ["--limit"],
                type=_FROM_ONE,
                metavar="N",
                help="tasks: only the first documents of each, as a trial.",
            ),
            click.Option(
                ["--fewshot"],
                type=click.IntRange(min=0),
                metavar="N",
                help="tasks: examples.  [default: as each says]",
            ),
            click.Option(
                ["--task-cache"],
                type=_PATH,
                metavar="DIR",
                help="tasks: keep what each model scored, by its hash.",
            ),
        ),
    ),
}


def chosen(names: str) -> tuple[str, ...]:
    """The suites in a list with commas, in the table's order.

    Raises:
        InvalidInput: there is no such suite.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in asked if name not in SUITES]
    if unknown or not asked:
        raise InvalidInput(
            f"--suite {names}: {unknown[0] if unknown else 'nothing'} is no suite; known are "
            f"{', '.join(SUITES)}"
        )
    return tuple(name for name in SUITES if name in asked)


def check_settings(names: Collection[str], given: Collection[str]) -> None:
    """Check that every option that the user gave belongs to a chosen suite.

    Raises:
        InvalidInput: it belongs to another one.
    """
    for name, suite in SUITES.items():
        for option in suite.options:
            if name not in names and option.name in given:
                raise InvalidInput(
                    f"{option.opts[0]} belongs to the suite {name}, which --suite does not name"
                )
