"""`python -m benchmarks.gpu PART`: see `--help` and benchmarks/README.md."""

import os
from pathlib import Path

import click

from kvfold.core.console import Command

_NAMES = ("kernel", "train", "fold", "distil", "large")
_RESULTS = Path(__file__).parent.parent / "results"


@click.command(cls=Command)
@click.argument("part", type=click.Choice([*_NAMES, "pretrained", "all", "summary", "unpack"]))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=_RESULTS,
    show_default="benchmarks/results",
    help="Where gpu-PART.json goes.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=Path("out/gpu"),
    show_default=True,
    help="For texts, checkpoints and rows that a later call resumes from.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=9.0,
    show_default=True,
    help="Of each part.",
)
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    help="fold, distil: a checkpoint instead of the one that was trained. pretrained: the checkpoint.",
)
@click.option("--text", type=click.Path(path_type=Path), help="pretrained: evaluation text.")
@click.option("--data", type=click.Path(path_type=Path), help="pretrained: text that folds are trained on.")
@click.option("--toy", "sizes", flag_value="toy", help="Sizes of a test, on the CPU.")
@click.option("--lent", "sizes", flag_value="lent", help="Sizes for 15 minutes of a GPU in all.")
def main(
    part: str,
    out: Path,
    work: Path,
    minutes: float,
    source: Path | None,
    text: Path | None,
    data: Path | None,
    sizes: str | None,
) -> None:
    """Measure one part, or all in turn.

    `pretrained` is not one of all, since it needs a checkpoint and texts. `summary` writes tables of what
    --out has; `unpack` makes a checkpoint of the twin in --out.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Before transformers is imported.
    os.environ.setdefault("HF_MODULES_CACHE", str(work.resolve() / "modules"))
    from .parcel import unpack
    from .parts import run_part
    from .summary import write_summary

    if part == "unpack":
        click.echo(f"unpacked {unpack(out, work)}")
        return
    if part == "summary":
        click.echo(write_summary(out))
        return
    failed = 0
    for name in _NAMES if part == "all" else (part,):
        failed += run_part(name, out, work, 60 * minutes, source, sizes or "full", (text, data))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
