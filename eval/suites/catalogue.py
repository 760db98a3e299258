"""The table of the suites that `kvfold eval --suite` may name. Importing this module loads nothing heavy.

A suite is a file of this folder and a row here. The file has these functions:

- `measure(subject)` returns the suite's block of eval.json, or None where the suite does not apply. See
  subject.py for the argument. A block is a frozen dataclass of plain values in `quality_blocks.py` or
  `cost_blocks.py` of `kvfold/checkpoints/`, with a row in `BLOCKS` of `eval_json.py` there.
- `rows(block, roles)` returns the block's lines of the table that is printed.
- `check(settings)`, which is optional, refuses bad values of the suite's options before a model is loaded.
- `check_room(subject)`, which is optional, refuses prompts too long for the models before any suite measures.
"""

from collections.abc import Collection, Sequence
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
        reads_text: it needs --text.
        on_all_ranks: every process of a launcher takes part; otherwise rank 0 measures alone.
        options: its own options on the command line; their values are in `subject.settings`.
        shorter: what makes its own prompts shorter, as an advice where memory is full; empty: nothing does.
    """

    module: str
    summary: str
    reads_text: bool = False
    on_all_ranks: bool = False
    options: tuple[click.Option, ...] = ()
    shorter: str = ""


_FROM_ONE = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)

SUITES = {
    "ppl": Suite(
        module="perplexity", summary="perplexity and bits per byte", reads_text=True, on_all_ranks=True
    ),
    "fidelity": Suite(
        module="fidelity", summary="KL to the teacher, same top-1, Δp", reads_text=True, on_all_ranks=True
    ),
    "storage": Suite(
        module="storage",
        summary="loss added by --cache-dtype, which chooses this suite",
        reads_text=True,
        on_all_ranks=True,
    ),
    "cache": Suite(
        module="cache",
        summary="elements and bytes of the KV cache",
        options=(
            click.Option(
                ["--memory"],
                type=ByteSize(),
                metavar="SIZE",
                help="cache: report how many sequences fit into this memory, e.g. 24GB.",
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
                help="speed: batch sizes.",
            ),
            click.Option(
                ["--speed-context"],
                metavar="N,N",
                help="speed: tokens of each prompt.  [default: 512,4096 as far as they fit]",
            ),
            click.Option(
                ["--speed-tokens"],
                type=_FROM_ONE,
                default=16,
                show_default=True,
                help="speed: tokens decoded per round.",
            ),
            click.Option(
                ["--speed-rounds"],
                type=click.IntRange(min=3),
                default=10,
                show_default=True,
                help="speed: rounds at most.",
            ),
            click.Option(
                ["--speed-seconds"],
                type=click.FloatRange(min=0, min_open=True),
                default=300.0,
                show_default=True,
                help="speed: time for the whole sweep; every cell that is begun gets 3 rounds.",
            ),
        ),
    ),
    "retrieval": Suite(
        module="retrieval",
        summary="keys found again in generated texts",
        shorter="smaller --retrieval-lengths",
        options=(
            click.Option(
                ["--retrieval-lengths"],
                metavar="N,N",
                help="retrieval: tokens per prompt.  [default: 1/4, 1/2 and all of the models' positions, at "
                "most 4096]",
            ),
            click.Option(
                ["--retrieval-depths"],
                type=_FROM_ONE,
                default=5,
                show_default=True,
                help="retrieval: number of depths, from the head of the text to its end.",
            ),
            click.Option(
                ["--retrieval-samples"],
                type=_FROM_ONE,
                default=10,
                show_default=True,
                help="retrieval: prompts per cell.",
            ),
            click.Option(
                ["--retrieval-keys"],
                type=click.IntRange(2, 10),
                default=4,
                show_default=True,
                help="retrieval: keys in a text, of which one is asked for.",
            ),
            click.Option(
                ["--retrieval-seed"],
                type=int,
                default=0,
                show_default=True,
                help="retrieval: seed of the texts.",
            ),
        ),
    ),
    "ruler": Suite(
        module="ruler",
        summary="generated tasks of RULER over long texts",
        shorter="smaller --ruler-lengths",
        options=(
            click.Option(
                ["--ruler-lengths"],
                metavar="N,N",
                help="ruler: tokens per prompt and answer.  [default: half and all of the models' positions, "
                "at most 4096, as far as every task fits]",
            ),
            click.Option(
                ["--ruler-tasks"],
                metavar="NAME,NAME",
                help="ruler: niah_single, niah_multikey, niah_multivalue, niah_multiquery, vt, cwe, fwe.  "
                "[default: all that fit]",
            ),
            click.Option(
                ["--ruler-samples"],
                type=_FROM_ONE,
                default=10,
                show_default=True,
                help="ruler: prompts per task and length.",
            ),
            click.Option(
                ["--ruler-seed"],
                type=int,
                default=0,
                show_default=True,
                help="ruler: seed of the prompts.",
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
                help="tasks: tasks of lm-evaluation-harness; mla-core: ARC, HellaSwag, PIQA, WinoGrande, "
                "OpenBookQA, BoolQ, MMLU.",
            ),
            click.Option(
                ["--task-path"],
                type=_PATH,
                metavar="DIR",
                help="tasks: directory of your own tasks, as YAML files; their code runs.",
            ),
            click.Option(
                ["--limit"],
                type=_FROM_ONE,
                metavar="N",
                help="tasks: only the first N documents of each task, as a trial.",
            ),
            click.Option(
                ["--fewshot"],
                type=click.IntRange(min=0),
                metavar="N",
                help="tasks: examples before each question.  [default: as each task says]",
            ),
            click.Option(
                ["--task-cache"],
                type=_PATH,
                metavar="DIR",
                help="tasks: cache of each model's scores, by the hash of its weights.",
            ),
        ),
    ),
}


def chosen(names: str) -> tuple[str, ...]:
    """Return the suites in a comma-separated list, in the table's order.

    Raises:
        InvalidInput: a suite is unknown, or none is named.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in asked if name not in SUITES]
    if not asked:
        raise InvalidInput(f"--suite names nothing; known are {', '.join(SUITES)}")
    if unknown:
        raise InvalidInput(f"--suite {names}: {unknown[0]} is not a suite; known are {', '.join(SUITES)}")
    return tuple(name for name in SUITES if name in asked)


def with_storage(names: Sequence[str], cache_dtype: str | None) -> tuple[str, ...]:
    """Return the suites that are run where the student's cache is in a number format, or in none.

    Args:
        names: the suites that are asked for, in the table's order.
        cache_dtype: the format; None for none.

    Returns:
        Them, and `storage` where there is a format and a suite that reads the text.

    Raises:
        InvalidInput: a suite has no meaning with a format, or none without.
    """
    if cache_dtype is None:
        if "storage" in names:
            raise InvalidInput(
                "--suite storage measures a number format of the cache; add --cache-dtype NAME"
            )
        return tuple(names)
    if "speed" in names:
        raise InvalidInput(
            "--suite speed times the cache as the model computes it, and --cache-dtype only rounds; leave "
            "one of them out"
        )
    reading = any(SUITES[name].reads_text for name in names)
    return tuple(name for name in SUITES if name in names or (name == "storage" and reading))


def check_settings(names: Collection[str], given: Collection[str]) -> None:
    """Check that every option that the user gave belongs to a chosen suite.

    Raises:
        InvalidInput: an option belongs to another suite.
    """
    for name, suite in SUITES.items():
        for option in suite.options:
            if name not in names and option.name in given:
                raise InvalidInput(
                    f"{option.opts[0]} belongs to the suite {name}, which --suite does not name"
                )
