"""`python -m benchmarks.gpu PART...`: each part measures its rows and writes gpu-PART.json.

A row is kept as soon as it is measured, and the same command measures what is missing. What fails is a
sentence in the result, and the rest runs; the exit code is 1 where a row failed.
"""

import os
from pathlib import Path
from typing import Any

import click

from kvfold.core.console import Command

from ..machine import RESULTS

PARTS = ("kernel", "distil", "large", "pretrained")


@click.command(cls=Command)
@click.argument("parts", nargs=-1, required=True, type=click.Choice(PARTS))
@click.option(
    "--out", type=click.Path(path_type=Path), default=RESULTS, show_default="benchmarks/results",
    help="Where gpu-PART.json goes.",
)  # fmt: skip
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("out/gpu"), show_default=True,
    help="Where folds and runs go.",
)  # fmt: skip
@click.option(
    "--source", type=click.Path(path_type=Path, exists=True), default=Path("recipes/demo"), show_default=True,
    help="distil, pretrained: the checkpoint.",
)  # fmt: skip
@click.option("--text", default="stdlib", show_default=True, help="pretrained: text of evaluations.")
@click.option("--data", default="stdlib", show_default=True, help="pretrained: text of trainings.")
@click.option("--toy", is_flag=True, help="Sizes of a test, on the CPU.")
def main(parts: tuple[str, ...], out: Path, work: Path, source: Path, **given: Any) -> None:
    """Measure parts on this machine's GPU.

    `kernel` measures the fused kernel, decoding steps and folds in transformers; `distil` training steps and
    losses; `large` folds of a model with 1.2 billion random weights; `pretrained` folds and trains --source.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Before transformers is imported.
    os.environ.setdefault("HF_MODULES_CACHE", str(work.resolve() / "modules"))
    import torch

    from kvfold.core.errors import InvalidInput

    from .commands import Asked, distil, large, pretrained
    from .kernel import kernel
    from .rows import Rows

    if not given["toy"] and not torch.cuda.is_available():
        raise InvalidInput(
            "torch sees no CUDA device here; --toy runs the same at the sizes of a test on this CPU"
        )
    torch.manual_seed(0)
    work.mkdir(parents=True, exist_ok=True)
    # Commands run in the repository, so places are absolute.
    asked = Asked(work=work.resolve(), source=source.resolve(), **given)
    failed = 0
    for part in parts:
        rows = Rows(part, out)
        if part == "kernel":
            kernel(rows, toy=asked.toy)
        else:
            {"distil": distil, "large": large, "pretrained": pretrained}[part](rows, asked)
        rows.write()
        failed += len(rows.failed)
        click.echo(f"{part}: {len(rows.rows)} rows, {len(rows.failed)} failed, in {rows.file}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
