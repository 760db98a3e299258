"""The Python API as commands, so that the same cases run it. `InvalidInput` is a sentence with exit code 2.

Nothing else is caught, and what a function prints is a fault.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import kvfold
from kvfold.core.console import calling
from kvfold.core.errors import InvalidInput
from kvfold.models.caches import cache_argument, cache_of
from kvfold.models.causal_lm import load
from kvfold.models.load_options import LoadOptions

_SMALL = {"window": 16, "max_windows": 2, "device": "cpu"}


@click.group()
def api() -> None:
    """Call a function of the Python API."""


def _command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    def make(function: Callable[..., Any]) -> click.Command:
        def run(paths: tuple[str, ...]) -> None:
            try:
                function(*paths)
            except InvalidInput as mistake:
                click.echo(f"Error: {mistake}", err=True)
                raise SystemExit(2) from None

        argument = click.Argument(["paths"], nargs=-1)
        command = click.Command(name, params=[argument], callback=run)
        api.add_command(command)
        return command

    return make


@_command("fold")
def _fold(source: str, out: str) -> None:
    folded = kvfold.fold(source, kvfold.GQA(kv_heads=2), out=out, calibration="none")
    assert str(folded)
    assert folded.load(device="cpu") is not None


@_command("plan")
def _plan(source: str) -> None:
    assert len(kvfold.plan(source, context=64)) > 0


@_command("evaluate")
def _evaluate(directory: str, text: str) -> None:
    found = kvfold.evaluate(directory, text=text, suites=("ppl", "fidelity"), **_SMALL)
    assert found["ppl.student.perplexity"] is not None
    assert str(found)


@_command("verify")
def _verify(directory: str) -> None:
    assert str(kvfold.verify(directory, run=False))


@_command("publish")
def _publish(directory: str) -> None:
    assert str(kvfold.publish(directory, "org/x", verify="lint", dry_run=True))


@_command("report")
def _report(*paths: str) -> None:
    *directories, page = paths
    assert kvfold.report(directories, page).is_file()


@_command("train")
def _train(recipe: str) -> None:
    assert str(kvfold.train(recipe))


@_command("absorb")
def _absorb(directory: str) -> None:
    """Load a checkpoint twice, absorb one, and compare what both decode."""
    ids = torch.arange(3, 11)[None]
    options = LoadOptions(device="cpu", dtype="float32")
    with calling():
        model, absorbed = (load(Path(directory), options).model for _ in range(2))
    ids = ids % model.config.vocab_size
    kvfold.absorb(absorbed)
    with torch.inference_mode():
        try:
            one = _decoded(model, ids)
        except Exception as error:  # whatever transformers' own class makes of the damage
            raise InvalidInput(f"the stock model cannot decode: {type(error).__name__}") from None
        other = _decoded(absorbed, ids)
    error = float((one - other).abs().max() / one.abs().max())
    assert not one.isfinite().all() or error < 1e-3, f"absorbed logits differ by {error:.2g}"


def _decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits of the last token, which is decoded with a cache of the others."""
    cache = cache_of(model(input_ids=ids[:, :-1], use_cache=True))
    return model(input_ids=ids[:, -1:], use_cache=True, **{cache_argument(model): cache}).logits
