"""Folds served by vLLM with kvfold's plugin, held against transformers: `python -m benchmarks.vllm_plugin`.

As benchmarks.vllm, by `kvfold verify --engine vllm+kvfold` on a CPU: with chunked prefill and prefix caching.
`make test-vllm` runs it too.
"""

import os
from importlib.metadata import packages_distributions
from importlib.util import find_spec

import click

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput
from kvfold.engines.fresh_process import NEAR

from .engine_rows import ONLY, UPDATE, run_folds
from .folds import WITH_PLUGIN


@click.command(cls=Command)
@ONLY
@UPDATE
def main(only: str, update: bool) -> None:
    """Serve every fold, print the table, and save it in benchmarks/results/vllm-plugin-cpu.json."""
    if find_spec("vllm") is None:
        raise InvalidInput("vLLM is not installed in this environment; `make test-vllm` makes one of its own")
    packages = packages_distributions()["vllm"]
    run_folds("vllm+kvfold", WITH_PLUGIN, only, NEAR, "vllm-plugin-cpu", packages, update=update)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
