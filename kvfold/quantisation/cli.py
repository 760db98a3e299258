"""The command `kvfold quantize`. It imports nothing heavy, since `--help` goes through it."""

import shlex
from pathlib import Path

import click

from ..core.console import Command, show_json, show_table, show_text
from ..core.units import ByteSize
from .scheme_names import SCHEMES

_SHARD = "5GB"


@click.command("quantize", cls=Command)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--scheme",
    type=click.Choice(tuple(SCHEMES)),
    required=True,
    help="; ".join(f"`{name}`: {scheme.words}" for name, scheme in SCHEMES.items()) + ".",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Output; must not exist.  [default: ./NAME-SCHEME]",
)
@click.option(
    "--group-size",
    type=click.IntRange(min=8),
    metavar="N",
    help="Columns of a weight that share a scale, for `w4a16`.  [default: the largest of 128, 64 and 32 that "
    "divides every width, or else the one that leaves the fewest numbers unquantised]",
)
@click.option(
    "--shard-size", type=ByteSize(), default=_SHARD, show_default=True, help="Most bytes of a weight file."
)
@click.option("--dry-run", is_flag=True, help="Show what would be rounded, and the bytes; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(
    directory: Path,
    scheme: str,
    out: Path | None,
    group_size: int | None,
    shard_size: int,
    dry_run: bool,
    as_json: bool,
) -> None:
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

    plan = plan_quantize(directory, scheme, out, group=group_size)
    record = None if dry_run else write_quantized(plan, shard_size)
    if as_json:
        show_json({"out": str(plan.out), **(plan.to_dict() if record is None else record)})
        return
    table = quantized_grid(f"{plan.out}{' (dry run)' if dry_run else ''}", plan.to_dict())
    show_table(table.title, table.columns, table.rows)
    if not dry_run:
        words = shlex.join(["kvfold", "eval", str(plan.out), "--teacher", str(directory)])
        show_text(f"Next: {words} --text FILE")
