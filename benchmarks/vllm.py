"""Folds served by vLLM, held against their sources in transformers: `make test-vllm`, or `python -m
benchmarks.vllm`.

Each fold is checked by `kvfold verify --engine vllm`, in float32 on a CPU and bfloat16 on a GPU:
log-probabilities of text that the source writes, greedy tokens, and what vLLM's own cache specification
allocates. Exit code 1 where something is wrong. Multimodal classes are asked for text alone. They import
torchvision, which `make test-vllm` puts next to the environment (torchvision_operators/sitecustomize.py).
"""

import os
from importlib.metadata import packages_distributions
from importlib.util import find_spec

import click
import torch

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput
from kvfold.engines.fresh_process import NEAR

from .engine_rows import ONLY, UPDATE, run_folds
from .folds import FAMILIES, FOLDS, IN_PLACE, OF_QUANTISED


@click.command(cls=Command)
@ONLY
@UPDATE
def main(only: str, update: bool) -> None:
    """Serve every fold, print the table, and save it in benchmarks/results/vllm-cpu.json (vllm-cuda.json on
    a GPU).
    """
    if find_spec("vllm") is None:
        raise InvalidInput("vLLM is not installed in this environment; `make test-vllm` makes one of its own")
    saved = "vllm-cuda" if torch.cuda.is_available() else "vllm-cpu"
    run_folds(
        "vllm",
        (*FOLDS, *FAMILIES, *OF_QUANTISED, *IN_PLACE),
        only,
        NEAR,
        saved,
        packages_distributions()["vllm"],
        update=update,
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
