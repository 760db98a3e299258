"""Folds served by SGLang, held against their sources in transformers: `make test-sglang`, or `python -m
benchmarks.sglang`.

Each fold is checked by `kvfold verify --engine sglang`, in float32 on a CPU and bfloat16 on a GPU:
log-probabilities of text that the source writes, greedy tokens, and what SGLang has allocated for a token.
Exit code 1 where something is wrong. `sglang_kernels/sitecustomize.py` says how SGLang is imported on a CPU.
"""

import os
from importlib.util import find_spec

import click
import torch

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput
from kvfold.engines.fresh_process import NEAR

from .engine_rows import ONLY, UPDATE, run_folds
from .folds import FAMILIES, FITTED, FOLDS, Fold

_SERVED = "--to mla --engine sglang"
# Folds of the first two are of classes, or have heads, that SGLang does not have (sglang_rules); attention by
# torch leaves out Gemma 2's bound on scores.
_OTHERS = {"gpt_neox", "mixtral", "gemma2"}
_EXPERTS = Fold(source="mixtral, 8 heads", options="--to gqa --kv-heads 2")
_LATENT = (
    Fold(source="llama", options=f"{_SERVED} --rank 512"),
    Fold(source="llama", options=f"{_SERVED} --rank 256", exact=False),
    Fold(source="demo", options=f"{_SERVED} --rank 512", exact=False),
    Fold(source="demo", options=f"{_SERVED} --rank 512 {FITTED}", exact=False),
    Fold(source="demo", options="--to mla --kv-budget 25% --container stock --slots uniform", exact=False),
)


def folds() -> tuple[Fold, ...]:
    """Return grouped folds of classes that differ, and the latent ones made for SGLang."""
    grouped = [fold for fold in (*FOLDS, *FAMILIES) if "--to mla" not in fold.options]
    return (*(fold for fold in grouped if fold.source not in _OTHERS), _EXPERTS, *_LATENT)


@click.command(cls=Command)
@ONLY
@UPDATE
def main(only: str, update: bool) -> None:
    """Serve every fold, print the table, and save it in benchmarks/results/sglang-cpu.json (sglang-cuda.json
    on a GPU).
    """
    if find_spec("sglang") is None:
        raise InvalidInput("SGLang is not installed in this environment; `make test-sglang` makes its own")
    saved = "sglang-cuda" if torch.cuda.is_available() else "sglang-cpu"
    run_folds("sglang", folds(), only, NEAR, saved, ("sglang",), update=update)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
