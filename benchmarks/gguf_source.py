"""A model directory from a GGUF file: `python -m benchmarks.gguf_source FILE... DIRECTORY`.

Two Python packages carry the weights of pretrained models in this format, so that folds can be measured on
such models where none can be downloaded; benchmarks/README.md names them. A file that was divided is given
as its parts, in order. What is written is the rounded model, in bfloat16: the published checkpoint differs
from it by the rounding of GGUF.
"""

import shutil
import tempfile
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "model.gguf"


def joined(files: tuple[Path, ...], folder: Path) -> None:
    """Write the parts of one file behind each other as `folder/NAME`."""
    with (folder / NAME).open("xb") as whole:
        for part in files:
            with part.open("rb") as read:
                shutil.copyfileobj(read, whole)


def rewrite(folder: Path, directory: Path) -> int:
    """Write the checkpoint of `folder/NAME` and return the number of its parameters.

    Raises:
        ValueError: it is not a GGUF file, or of an architecture that transformers cannot read.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=NAME)
    del model.config.quantization_config  # the weights are dequantised; what is written has no such format
    model.hf_quantizer = None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return int(model.num_parameters())


@click.command(help=__doc__)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.argument("directory", type=click.Path(path_type=Path))
def main(files: tuple[Path, ...], directory: Path) -> None:
    """Write the directory."""
    if directory.exists():
        raise click.ClickException(f"{directory} exists; name a directory that does not")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        joined(files, folder)
        try:
            parameters = rewrite(folder, directory)
        except (ImportError, ValueError, OSError) as error:
            raise click.ClickException(f"{files[0]} cannot be read as GGUF: {error}") from None
    click.echo(f"{directory}: {parameters:,} parameters")


if __name__ == "__main__":
    main()
