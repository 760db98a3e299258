"""`kvfold report`: evaluations as one HTML page. Importing this module loads nothing heavy, for `--help`."""

from pathlib import Path

import click

from ...core.console import Command, show_json, show_text
from ...core.units import show_bytes


@click.command("report", cls=Command)
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="The HTML file to write; must not exist.",
)
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write every figure as a PNG into this new directory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a sentence.")
def main(directories: tuple[Path, ...], out: Path, png: Path | None, as_json: bool) -> None:
    """Show evaluations of checkpoints as one HTML page that needs no network.

    Each DIR is a checkpoint with an eval.json, written by `kvfold eval DIR --text FILE --out DIR/eval.json`.
    Suites that were measured later are read from DIR/eval-*.json. In addition to the evaluation, the page
    shows the conversion from kvfold.json and the distillation from metrics.jsonl and curve.json. For each
    missing measurement it gives the command that makes it.
    """
    from .document import write_page

    figures, summary = write_page(directories, out, png)
    if as_json:
        show_json(summary)
        return
    size = show_bytes(out.stat().st_size)
    show_text(f"Wrote {out}: {figures} figures, {size}{f'; their PNGs are in {png}' if png else ''}.")
