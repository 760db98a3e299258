"""The command `kvfold assemble`. It imports nothing heavy, since `--help` goes through it."""

import shlex
from pathlib import Path
from typing import Any

import click

from ...core.command_options import read_options, takes
from ...core.console import Command, show_json, show_text
from .request import AssembleRequest


@click.command("assemble", cls=Command)
@click.argument("tower", metavar="TOWER", type=click.Path(path_type=Path))
@click.argument("whole", metavar="WHOLE")
@takes(AssembleRequest, without=("tower", "whole"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(as_json: bool, **options: Any) -> None:
    """Put the folded text tower in TOWER back into the multimodal checkpoint WHOLE.

    TOWER is an output of `kvfold convert WHOLE --text-only`, or what `kvfold distill` made of it; WHOLE is a
    directory or a Hub id. The output has the class of WHOLE; all tensors but the tower's keep their bytes.
    Neither of the two is changed. The record names WHOLE as the source, so `kvfold eval` compares with it.
    """
    from .assemble import assemble_tower

    asked = read_options(AssembleRequest, options)
    place = assemble_tower(asked.tower, asked.whole, asked.out, asked.shard_size)
    if as_json:
        from ...checkpoints.record import read_record

        show_json({"out": str(place), **(read_record(place) or {})})
        return
    show_text(f"{place}: {asked.whole} with the text tower of {asked.tower}")
    show_text(f"Next: {shlex.join(['kvfold', 'eval', str(place)])} --text FILE")
