"""The loss that quantised weights add to a source and to its folds.

`python -m benchmarks.quantised_weights MODEL --text FILE` folds MODEL to GQA and to stock MLA, with the
model's own text as calibration. The source and each fold are quantised by `kvfold quantize` in each scheme
and run by transformers with compressed-tensors, which rounds activations too where the scheme does. A row
has the KL divergence of a quantised model from the same model unquantised, in nats per token, and its ratio
to that of the source. `rounded` under `latent` means that latent attention's projections are rounded too,
which `kvfold quantize` leaves.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvfold
from kvfold import GQA, MLA
from kvfold.core.console import show_table
from kvfold.models.causal_lm import load_tokenizer
from kvfold.quantisation.chosen_weights import LATENT
from kvfold.quantisation.quantize import plan_quantize, write_quantized
from kvfold.quantisation.request import SCHEMES
from kvfold.texts.corpus import read_text

from .machine import save

BATCH = 8  # windows that run at once


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--text", required=True, help="Held-out text, as for `kvfold eval`.")
@click.option("--window", default=256, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=32, show_default=True, help="How many windows are read, evenly spread.")
@click.option("--budget", default="25%", show_default=True, help="Share of the source's cache.")
@click.option(
    "--folds",
    "made",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory that has the folds as `gqa` and `mla`; by default they are made.",
)
@click.option("--revision", required=True, help="The commit of kvfold, for the results.")
def main(
    model: Path, text: str, window: int, windows: int, budget: str, made: Path | None, revision: str
) -> None:
    """Measure one source and write benchmarks/results/quantised-weights-NAME.json."""
    tokens_BT = read_windows(model, text, window, windows)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        places = {"source": model, **folds(model, budget, work if made is None else made)}
        source = log_probabilities(model, tokens_BT)
        for name, directory in places.items():
            plain = source if name == "source" else log_probabilities(directory, tokens_BT)
            for scheme in SCHEMES:
                for label, kept in {"": LATENT, "everything": ()}.items():
                    if label and name != "mla":
                        continue
                    row = {"model": name, "scheme": scheme, "latent": "rounded" if label else "kept"}
                    out = work / f"{name}-{scheme}{label}"
                    rows.append(row | measure(directory, scheme, out, kept, plain, source, tokens_BT))
                    click.echo(rows[-1], err=True)
    for row in rows:
        base = next(one for one in rows if one["model"] == "source" and one["scheme"] == row["scheme"])
        row["ratio"] = row["kl"] / base["kl"]
    name = f"quantised-weights-{model.resolve().name}"
    save(
        name,
        {
            "revision": revision,
            "text": Path(text).name,
            "window": window,
            "windows": len(tokens_BT),
            "rows": rows,
        },
    )
    columns = ("model", "scheme", "latent", "group_size", "bytes_share", "kl", "ratio", "added_to_source")
    cells = [[str(row[column])[:8] for column in columns] for row in rows]
    show_table(f"{model.name}, {budget}, {len(tokens_BT)} windows of {window}", columns, cells)


def folds(model: Path, budget: str, work: Path) -> dict[str, Path]:
    """Fold a model to each target with the default effort, by the same statistics, unless that was done."""
    kept, names = work / "statistics.safetensors", ("gqa", "mla")
    if all((work / name).is_dir() for name in names):
        return {name: work / name for name in names}
    kvfold.fold(model, GQA(kv_budget=budget), out=work / "gqa", save_statistics=kept, verify="none")
    latent = MLA(kv_budget=budget)
    kvfold.fold(model, latent, out=work / "mla", calibration=kept, container="stock", verify="none")
    return {name: work / name for name in names}


def measure(
    directory: Path,
    scheme: str,
    out: Path,
    kept: tuple[str, ...],
    plain: Tensor,
    source: Tensor,
    tokens_BT: Tensor,
) -> dict[str, Any]:
    """Quantise a checkpoint; return its KL from itself, and the KL that this adds from the source."""
    plan = plan_quantize(directory, scheme, out, kept=kept)
    write_quantized(plan)
    rounded = log_probabilities(out, tokens_BT)
    found = plan.to_dict()
    return {
        "group_size": found["group_size"],
        "rounded_share": found["rounded_share"],
        "bytes_share": found["bytes_after"] / found["bytes_before"],
        "kl": divergence(plain, rounded),
        "added_to_source": divergence(source, rounded) - divergence(source, plain),
    }


def read_windows(model: Path, text: str, window: int, count: int) -> Tensor:
    """Return windows of a text, evenly spread, (B, T)."""
    ids = torch.tensor(load_tokenizer(model)("\n\n".join(read_text(text).documents), verbose=False).input_ids)
    windows_NT = ids[: len(ids) // window * window].unflatten(0, (-1, window))
    return windows_NT[:: max(len(windows_NT) // count, 1)][:count]


@torch.no_grad()
def log_probabilities(directory: Path, tokens_BT: Tensor) -> Tensor:
    """Return the log-probabilities of a checkpoint in float32, run by transformers alone, (B, T, V)."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return torch.cat([model(part).logits.log_softmax(-1) for part in tokens_BT.split(BATCH)])


def divergence(exact_BTV: Tensor, other_BTV: Tensor) -> float:
    """Return the mean KL divergence in nats per token."""
    total = sum(
        float((one.exp() * (one - other)).sum(dtype=torch.float64))
        for one, other in zip(exact_BTV, other_BTV, strict=True)
    )
    return total / (exact_BTV.shape[0] * exact_BTV.shape[1])


if __name__ == "__main__":
    main()
