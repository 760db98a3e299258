"""The rules about MLX that say what fails, held against MLX: part of `make test-mlx`.

`python -m benchmarks.mlx_rules` makes outputs that break a rule, and runs mlx-lm on them. Each must end with
the error that the rule names, or be as wrong as it says. Exit code 1 where a rule is not true.
"""

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput

from .rule_rows import WRONG, finish, fold, ruled, text

_STOCK = "--to mla --rank 256 --engine mlx --calibration none"
# name -> source, options, condition of the rule, words of the error
REFUSED = {
    "MLA remote": ("llama", "--to mla --rank 512 --container remote", "always", "not supported"),
    "MLA remote, rope intact": ("llama", "--to mla --rank full --rope intact", "always", "not supported"),
    "tied head": ("llama", _STOCK, "the head is tied", "lm_head.weight"),
    "longrope": ("llama, linear rope", "--to mla --rank full --container stock",
                 "rope_type is not default", "ZeroDivisionError"),
}  # fmt: skip


def scores(directory: Path, dtype: str | None = None) -> numpy.ndarray[Any, Any]:
    """Return the log-probabilities that MLX gives all tokens at each position of a text, float32, in nats.

    Args:
        directory: the checkpoint.
        dtype: `float32`, `float16` or `bfloat16`; None: that of the file.
    """
    import mlx.core as mx  # type: ignore[import-not-found]
    from mlx_lm.utils import load_model  # type: ignore[import-not-found]

    model, config = load_model(directory)
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    logits = model(mx.array([text(config)]))[0].astype(mx.float32)
    return numpy.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def tie(directory: Path) -> None:
    """Delete a checkpoint's head, and say in its config.json that the embedding is the head."""
    file = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    words = json.dumps({**config, "tie_word_embeddings": True})
    (directory / "config.json").write_text(words, encoding="utf-8")


def refused(root: Path, name: str) -> dict[str, Any]:
    """Return the row of an output that mlx-lm must not load."""
    source, options, condition, error = REFUSED[name]
    _, out = fold(root, name, source, options)
    if name == "tied head":
        tie(out)
    rules = ruled(out, condition, "mlx")
    told = "it loads and answers"
    try:
        scores(out)
    except (ValueError, ZeroDivisionError) as failure:
        told = f"{type(failure).__name__}: {failure}"
    row = {"output": name, "condition": condition, "rules": rules, "found": " ".join(told.split())[:200]}
    return row | {"true": error in told}


def gap(found: numpy.ndarray[Any, Any], known: numpy.ndarray[Any, Any]) -> float:
    """Return the mean absolute difference, nats; infinite where a number is none."""
    mean = float(numpy.abs(found - known).mean())
    return mean if numpy.isfinite(mean) else float("inf")


def rounded(root: Path) -> list[dict[str, Any]]:
    """Return rows that say how far the linear norm, and its source, are from float32 in fewer bits."""
    from mlx_lm import convert as quantise  # type: ignore[import-not-found]

    source, out = fold(root, "linear", "demo", _STOCK)
    rules = ruled(out, "a linear latent norm", "mlx")
    gaps: dict[str, dict[str, float]] = {}
    for name, place in {"source": source, "fold": out}.items():
        exact = scores(place, "float32")
        gaps[name] = {kind: gap(scores(place, kind), exact) for kind in ("bfloat16", "float16")}
        small = root / f"{name}-4-bit"
        quantise(str(place), str(small), quantize=True, q_bits=4, q_group_size=64)
        gaps[name]["4 bits"] = gap(scores(small), exact)
    rows = []
    for kind in ("bfloat16", "float16", "4 bits"):
        ours, theirs = gaps["fold"][kind], gaps["source"][kind]
        is_wrong = ours > max(WRONG, 3 * theirs)
        words = f"{ours:.2e} nats from float32, the source {theirs:.2e}"
        row = {"output": f"linear norm, {kind}", "condition": "a linear latent norm", "rules": rules}
        rows.append(row | {"found": words, "true": is_wrong == (kind != "bfloat16")})
    return rows


def windowed(root: Path) -> dict[str, Any]:
    """Return the row of a sliding window that mlx-lm's class does not have."""
    source, out = fold(root, "window", "gemma2", "--to gqa --kv-heads 2")
    condition = "a sliding window that mlx-lm's class does not have"
    rules = ruled(out, condition, "mlx")
    gaps = {}
    for name, place in {"source": source, "fold": out}.items():
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        with torch.no_grad():
            known = model(torch.tensor([text(model.config.to_dict())])).logits[0].log_softmax(-1).numpy()
        gaps[name] = numpy.abs(scores(place, "float32") - known).max(axis=1)
    first = model.config.sliding_window
    inside, past = (max(float(part.max()) for part in parts) for parts in (
        [rows[:first] for rows in gaps.values()], [rows[first:] for rows in gaps.values()]))  # fmt: skip
    least = min(float(rows[first:].max()) for rows in gaps.values())
    words = f"{inside:.1e} nats inside the window, {past:.1e} past it (fold and source)"
    row = {"output": "GQA of Gemma 2", "condition": condition, "rules": rules, "found": words}
    return row | {"true": inside < 1e-4 and least > WRONG}


@click.command(cls=Command)
def main() -> None:
    """Break the rules, print the table, and save it in benchmarks/results/mlx-rules-cpu.json."""
    if find_spec("mlx_lm") is None:
        raise InvalidInput("MLX is not installed in this environment; `make test-mlx` makes one of its own")
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        rows = [refused(root, name) for name in REFUSED]
        rows += [windowed(root), *rounded(root)]
    finish(rows, "MLX", "mlx-rules-cpu", ("mlx", "mlx-lm", "transformers"))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
