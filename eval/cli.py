"""`kvfold eval`: perplexity, distance to the teacher and cache of a checkpoint."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from ..convert.console import Command, notice, show_json, show_table
from ..convert.errors import InvalidInput
from .options import DEVICES, DTYPES, Options


@click.command("eval", cls=Command)
@click.argument("model")
@click.option("--text", required=True, metavar="FILE|stdlib", help="A UTF-8 text, or the held-out part of Python's library.")
@click.option("--teacher", metavar="MODEL", help="What to compare with.  [default: the source named in kvfold.json]")
@click.option(
    "--window",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens of a window.  [default: what the models take, at most 2048]",
)
@click.option("--bos/--no-bos", default=None, help="Start each window with BOS.  [default: if the tokenizer has one]")
@click.option("--max-windows", type=click.IntRange(min=1), metavar="N", help="Read only so many windows.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=Options.batch_size,
    show_default=True,
    metavar="N",
    help="Windows at once.",
)
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto: cuda where there is one.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    help="auto: the checkpoint's own on cuda, float32 on cpu.",
)
@click.option("--trust-remote-code", is_flag=True, help="Let Python files of the checkpoints run.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the JSON report there too.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON report instead of the table.")
def main(model: str, text: str, teacher: str | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure the checkpoint MODEL (a directory or a Hub id) on a text, with its teacher on the same windows.

    Perplexity of both, KL(teacher || student), how often both find the same next token most probable, the KV cache of the
    running models and, for a distilled checkpoint, the share of the conversion's loss that was recovered.
    """
    from .corpus import read_text

    with nullcontext() if out is None else _reserved(out) as write:
        content = read_text(text)

        from ..convert.card import folded_parent, source_directory
        from ..convert.hub import resolve
        from .run import evaluate

        student = resolve(model)
        source = source_directory(student) if teacher is None else resolve(teacher)
        if source is None:
            notice(f"{student} names no teacher in a kvfold.json; give one with --teacher to compare with it")
        result = evaluate(student, source, content, Options(**options), parent=folded_parent(student))
        report = result.to_json()
        if write is not None:
            write(json.dumps(report, indent=2) + "\n")
    if as_json:
        show_json(report)
    else:
        show_table(result.title, result.columns, result.rows)


@contextmanager
def _reserved(out: Path) -> Iterator[Callable[[str], None]]:
    """Make `<out>.partial` before the long work, yield what fills it and gives it its name; without that it is removed.

    Raises:
        InvalidInput: `out` exists or cannot be written, or the partial file is somebody else's.
    """
    partial = out.with_name(out.name + ".partial")
    with _told(out):
        if out.exists() or out.is_symlink():
            raise InvalidInput(f"--out {out} exists; name another file")
        if not out.parent.is_dir():
            raise InvalidInput(f"--out {out}: there is no directory {out.parent}")
        # What a killed evaluation leaves is empty.
        if partial.is_symlink() or (partial.exists() and (not partial.is_file() or partial.stat().st_size)):
            raise InvalidInput(f"--out {out}: {partial} exists; move it, or name another file")
        partial.touch()

    def write(report: str) -> None:
        with _told(out):
            partial.write_text(report, encoding="utf-8")
            partial.rename(out)

    try:
        yield write
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _told(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"--out {out} cannot be written: {error.strerror}; name another file") from None
