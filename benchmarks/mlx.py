"""Folds run by MLX, held against their sources in transformers.

`make test-mlx`, or `python -m benchmarks.mlx`. `kvfold verify --engine mlx` checks each fold in float32:
log-probabilities of text that the source writes, greedy tokens, and what the cache holds. Exit code 1 where
something is wrong.
"""

import os
from importlib.util import find_spec

import click

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput

from .engine_rows import ONLY, UPDATE, run_folds
from .folds import FAMILIES, FOLDS, Fold

NEAR = 3e-5  # nats, float32: what sums in another order cost on these folds
_GROUPED = {"llama", "gpt2"}  # mlx-lm has no sliding windows in gemma2 and mixtral
_SERVED = "--to mla --engine mlx"
_MLX = (
    Fold(source="llama", options=f"{_SERVED} --rank 512"),
    Fold(source="llama", options=f"{_SERVED} --rank 256"),
    Fold(source="llama", options=f"{_SERVED} --kv-budget 25%"),
    Fold(source="llama, linear rope", options=f"{_SERVED} --rank 512", exact=False),
    Fold(source="demo", options=f"{_SERVED} --kv-budget 25%", exact=False),
)


def folds() -> tuple[Fold, ...]:
    """Return grouped folds of classes that differ, and the latent ones made for MLX."""
    grouped = [fold for fold in (*FOLDS, *FAMILIES) if "--to mla" not in fold.options]
    return (*(fold for fold in grouped if fold.source in _GROUPED), *_MLX)


@click.command(cls=Command)
@ONLY
@UPDATE
def main(only: str, update: bool) -> None:
    """Run every fold, print the table, and save it in benchmarks/results/mlx-cpu.json."""
    if find_spec("mlx_lm") is None:
        raise InvalidInput("MLX is not installed in this environment; `make test-mlx` makes one of its own")
    run_folds("mlx", folds(), only, NEAR, "mlx-cpu", ("mlx", "mlx-lm"), update=update)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
