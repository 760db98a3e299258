"""The command `kvfold assemble`. It imports nothing heavy, since `--help` goes through it."""

import shlex
from pathlib import Path

import click

from ...core.console import Command, show_json, show_text
from ...core.units import ByteSize


@click.command("assemble", cls=Command)
@click.argument("tower", metavar="TOWER", type=click.Path(path_type=Path))
@click.argument("whole", metavar="WHOLE")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Output; must not exist.  [default: ./NAME-TARGET]",
)
@click.option(
    "--shard-size", type=ByteSize(), default="5GB", show_default=True, help="Most bytes of a weight file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(tower: Path, whole: str, out: Path | None, shard_size: int, as_json: bool) -> None:
    """Put the folded text tower in TOWER back into the multimodal checkpoint WHOLE.

    TOWER is an output of `kvfold convert WHOLE --text-only`, or what `kvfold distill` made of it; WHOLE is a
    directory or a Hub id. The output has the class of WHOLE; all tensors but the tower's keep their bytes.
    Neither of the two is changed. The record names WHOLE as the source, with which `kvfold eval` compares.
    """
    from ...tower_run import assemble

    place = assemble(tower, whole, out=out, shard_size=shard_size)
    if as_json:
        from ...checkpoints.record import read_record

        show_json({"out": str(place), **(read_record(place) or {})})
        return
    show_text(f"{place}: {whole} with the text tower of {tower}")
    show_text(f"Next: {shlex.join(['kvfold', 'eval', str(place)])} --text FILE")
