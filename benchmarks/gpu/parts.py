"""One call of a part: its device, its source and its time."""

from pathlib import Path

import click
import torch

from kvfold.core.errors import InvalidInput

from .distil import distil
from .fold import fold
from .kernel import kernel
from .large import large
from .ledger import Ledger
from .parcel import pack
from .pretrained import pretrained
from .sizes import SIZES, Sizes
from .source import SPENT, train
from .summary import table
from .text import write_text


def run_part(
    part: str,
    out: Path,
    work: Path,
    seconds: float,
    source: Path | None,
    sizes_name: str,
    texts: tuple[Path | None, Path | None] = (None, None),
) -> int:
    """Measure what is missing of a part, print its table and return the number of rows that failed.

    Args:
        part: its name.
        out: directory of the result.
        work: directory of everything else.
        seconds: of this call.
        source: a checkpoint to be folded; None: the one that the part `train` made.
        sizes_name: of SIZES; `toy` runs on the CPU.
        texts: of the part `pretrained`: for evaluation and training.

    Raises:
        InvalidInput: torch sees no GPU, or there is no source or text.
    """
    if sizes_name != "toy" and not torch.cuda.is_available():
        raise InvalidInput(
            "torch sees no CUDA device here; --toy runs the same at the sizes of a test on this CPU"
        )
    device, sizes = "cpu" if sizes_name == "toy" else "cuda", SIZES[sizes_name]
    torch.manual_seed(0)
    ledger = Ledger(part, sizes.name, work, out, seconds)
    if part != "pretrained" and texts != (None, None):
        raise InvalidInput("--text and --data are of the part pretrained alone; leave them out")
    if part == "kernel":
        kernel(ledger, sizes, device)
    elif part == "train":
        train(ledger, sizes, work, device, min(SPENT * seconds, sizes.most_seconds))
        if (work / sizes.carried).exists():
            pack(work / sizes.carried, out)
    elif part == "large":
        large(ledger, sizes, work.resolve(), device)
    elif part == "pretrained":
        _pretrained(ledger, sizes, work, source, *texts)
    else:
        directory = source or work / "source"
        if not (directory / "config.json").exists():
            raise InvalidInput(
                f"{directory} has no checkpoint; run the part train first, or name one with --source"
            )
        write_text(work, sizes)
        measure = fold if part == "fold" else distil
        measure(ledger, sizes, work, directory, device)
    ledger.write()
    click.echo(table(part, ledger.rows))
    click.echo(
        f"{part}: {len(ledger.rows)} rows, {len(ledger.not_run)} not run, {len(ledger.failed)} failed, in "
        f"{out / f'gpu-{part}.json'}"
    )
    for label, reason in [*ledger.not_run.items(), *ledger.failed.items()]:
        click.echo(f"  {label}: {reason}")
    return len(ledger.failed)


def _pretrained(
    ledger: Ledger, sizes: Sizes, work: Path, source: Path | None, text: Path | None, data: Path | None
) -> None:
    """Measure the part `pretrained`, whose places are resolved since commands run in the repository."""
    if source is None or text is None or data is None:
        raise InvalidInput("the part pretrained needs --source DIR, --text FILE and --data FILE")
    if not (source / "config.json").is_file():
        raise InvalidInput(f"--source {source} has no config.json; name the directory of a checkpoint")
    for option, file in (("--text", text), ("--data", data)):
        if not file.is_file():
            raise InvalidInput(f"{option} {file} is not a file; name a text")
    pretrained(ledger, sizes, work.resolve(), source.resolve(), text.resolve(), data.resolve())
