"""The command `kvfold quantize`. It imports nothing heavy, since `--help` goes through it."""

import shlex
from pathlib import Path
from typing import Any

import click

from ..core.command_options import read_options, takes
from ..core.console import Command, show_json, show_table, show_text
from .request import QuantizeRequest


@click.command("quantize", cls=Command)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@takes(QuantizeRequest, without=("directory",))
@click.option("--dry-run", is_flag=True, help="Show what would be rounded, and the bytes; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(dry_run: bool, as_json: bool, **options: Any) -> None:
    """Round the linear weights of the checkpoint in DIR to 8 or 4 bits.

    DIR is a folded, a distilled or an unfolded checkpoint; it is not changed. The output is one in the layout
    of compressed-tensors, which transformers and vLLM read, and which the other commands take as any other.
    Weights are rounded to nearest, so no text is needed. The head, embeddings, norms, routers of experts, and
    latent attention's projections to and from the cache (kv_a, kv_b) keep their bytes, and so does a weight
    whose width the groups do not divide. Needs the package compressed-tensors (pip install
    'kvfold[quantize]').
    """
    from ..results import quantized_grid
    from .quantize import plan_quantize, write_quantized

    asked = read_options(QuantizeRequest, options)
    plan = plan_quantize(asked.directory, asked.scheme, asked.out, group=asked.group_size)
    record = None if dry_run else write_quantized(plan, asked.shard_size)
    if as_json:
        show_json({"out": str(plan.out), **(plan.to_dict() if record is None else record)})
        return
    table = quantized_grid(f"{plan.out}{' (dry run)' if dry_run else ''}", plan.to_dict())
    show_table(table.title, table.columns, table.rows)
    if not dry_run:
        words = shlex.join(["kvfold", "eval", str(plan.out), "--teacher", str(asked.directory)])
        show_text(f"Next: {words} --text FILE")
