"""Training and rounding of outputs with ordinary tools: `python -m benchmarks.trainable MODEL --text A
--eval-text B`.

The source and its folds with a fitted latent norm, and at one size with a linear one and with code of their
own, are trained for ten steps by AdamW with clipped gradients, by `transformers.Trainer` with gradient
checkpointing, and by PEFT's LoRA on all linear layers. Losses are on the same held-out windows before and
after. Rounding is the mean change of log-probabilities against float32. Weights of 8 and 4 bits are rounded
and computed with in float32, so that the error is that of the weights alone.
"""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.efforts import EFFORTS
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.texts.documents import read_sequences

from .machine import save

FITTED = {"container": "stock", "latent_norm": "fitted"}
OTHERS = {"linear": {"container": "stock", "latent_norm": "linear"}, "remote": {"container": "remote"}}
WITHIN = 0.02  # nats that a fold's gain in training may fall behind its source's
ROUNDED = 4  # held-out windows
STEPS, BATCH, CLIP = 10, 4, 1.0
RATES = (1e-4, 2e-4)
BLOCK = 64  # numbers of a weight, in a row, that share a scale in 4 bits
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max

Row = dict[str, float]


@torch.no_grad()
def held_out_loss(model: Any, tokens_BT: Tensor) -> float:
    """Return the cross entropy of a model on windows, nats per token."""
    model.eval()
    parts = [float(model(part, labels=part).loss) * len(part) for part in tokens_BT.split(2 * BATCH)]
    return sum(parts) / len(tokens_BT)


def train_plainly(model: Any, tokens_BT: Tensor, rate: float) -> Any:
    """Train all weights by AdamW for one pass over the windows, with gradients clipped; return the model."""
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    for part in tokens_BT.split(BATCH):
        model(part, labels=part).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model


class _Windows(Dataset[dict[str, Tensor]]):
    def __init__(self, tokens_BT: Tensor) -> None:
        self._tokens_BT = tokens_BT

    def __len__(self) -> int:
        return len(self._tokens_BT)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens_BT[number], "labels": self._tokens_BT[number]}


def train_by_trainer(model: Any, tokens_BT: Tensor, rate: float) -> Any:
    """Train by `transformers.Trainer` with gradient checkpointing; return the model."""
    with tempfile.TemporaryDirectory() as work:
        arguments = TrainingArguments(
            output_dir=work, max_steps=len(tokens_BT) // BATCH, per_device_train_batch_size=BATCH,
            learning_rate=rate, lr_scheduler_type="constant", max_grad_norm=CLIP,
            gradient_checkpointing=True, use_cpu=not torch.cuda.is_available(), report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=_Windows(tokens_BT)).train()
    return model


def train_adapters(model: Any, tokens_BT: Tensor, rate: float) -> Any:
    """Train LoRA adapters on all linear layers by AdamW; return the model with the adapters merged."""
    from peft import LoraConfig, get_peft_model

    targets: dict[str, Any] = {"target_modules": "all-linear"}
    if model.config.model_type == "deepseek_v3":  # of which PEFT 0.21 leaves out the MLP (docs/serve.md)
        targets = {
            "target_modules": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "target_parameters": [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")],
        }
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **targets))
    plain = [name for name, module in adapted.named_modules() if type(module) is nn.Linear]
    left = [name for name in plain if ".lora_" not in name and not name.endswith((".base_layer", "lm_head"))]
    assert not left, f"no adapter: {', '.join(left)}"
    return train_plainly(adapted, tokens_BT, rate).merge_and_unload()


WAYS: dict[str, tuple[Callable[[Any, Tensor, float], Any], float]] = {
    f"{name} {rate:g}": (way, rate)
    for name, way in (("AdamW", train_plainly), ("Trainer", train_by_trainer), ("LoRA", train_adapters))
    for rate in RATES
}


def in_fp8(weight: Tensor) -> Tensor:
    """Round to float8 (e4m3) with one scale for the tensor."""
    scale = weight.abs().max().clamp(min=1e-30) / _LARGEST_FP8
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def in_four_bits(weight: Tensor) -> Tensor:
    """Round to 15 equal steps (-7 to 7) of a scale for every block of numbers."""
    rows = nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).unflatten(0, (-1, BLOCK))
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
    return ((rows / scale).round() * scale).flatten()[: weight.numel()].view_as(weight)


def in_dtype(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a change of a whole model into a dtype."""
    return lambda model: model.to(dtype)


def quantised(rounding: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Return a change of the weights of all linear layers but the head."""

    @torch.no_grad()
    def change(model: Any) -> Any:
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.weight.copy_(rounding(module.weight))
        return model

    return change


ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "float16": in_dtype(torch.float16),
    "bfloat16": in_dtype(torch.bfloat16),
    "FP8 weights": quantised(in_fp8),
    "4-bit weights": quantised(in_four_bits),
}


@torch.no_grad()
def rounding_errors(load: Callable[[], Any], tokens_BT: Tensor) -> dict[str, float]:
    """Return the mean |change| of log-probabilities, nats, by each of `ROUNDINGS`.

    Args:
        load: returns the model, in float32, anew.
        tokens_BT: text.
    """
    exact = load().eval()(tokens_BT).logits.log_softmax(-1)
    errors = {}
    for name, change in ROUNDINGS.items():
        rounded = change(load().eval())(tokens_BT).logits.float().log_softmax(-1)
        errors[name] = float((rounded - exact).abs().mean())
    return errors


def load(directory: Path) -> Any:
    """Return a checkpoint's model in float32, as a user of transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True)


def measure(directory: Path, train_BT: Tensor, held_BT: Tensor) -> Row:
    """Return one checkpoint's losses before and after every way of training, and its rounding errors."""
    found = {"before": held_out_loss(load(directory), held_BT)}
    for way, (train, rate) in WAYS.items():
        found[way] = held_out_loss(train(load(directory), train_BT, rate), held_BT)
    return found | rounding_errors(lambda: load(directory), held_BT[:ROUNDED])


def behind(row: Row, source: Row) -> float:
    """Return by how much a fold gained less than its source in the way that suits it worst, nats."""
    return max((row[way] - row["before"]) - (source[way] - source["before"]) for way in WAYS)


def rounds_worse(row: Row, source: Row) -> float:
    """Return a fold's rounding error over its source's, in the rounding that suits it worst."""
    return max(row[name] / source[name] for name in ROUNDINGS)


def labels(budgets: Sequence[str], contrast: str | None) -> dict[str, dict[str, Any]]:
    """Return the options of every row by its label; the source has none.

    Args:
        budgets: of the folds with a fitted norm.
        contrast: the budget at which the other folds are measured.
    """
    rows: dict[str, dict[str, Any]] = {"source": {}}
    rows |= {f"fitted {budget}": {**FITTED, "kv_budget": budget} for budget in budgets}
    if contrast is not None:
        rows |= {f"{label} {contrast}": {**form, "kv_budget": contrast} for label, form in OTHERS.items()}
    return rows


def measure_row(
    directory: Path,
    work: Path,
    label: str,
    options: dict[str, Any],
    statistics: Callable[[], Statistics],
    effort: dict[str, Any],
    train_BT: Tensor,
    held_BT: Tensor,
) -> Row:
    """Return one row; what an earlier run left in `work`, its fold or all of it, is not made again.

    Args:
        directory: the source.
        work: where folds and rows are kept.
        label: of the row.
        options: of the fold.
        statistics: returns those of the source.
        effort: options of the fold's effort, such as `effort` and `refine`.
        train_BT: windows to train on.
        held_BT: windows to measure on.
    """
    place = work / re.sub(r"\W+", "_", label).strip("_")
    file = work / f"{place.name}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    row: Row = {}
    if options:
        if not place.exists():
            asked = {"model": str(directory), "to": "mla", "dtype": "float32", **options, **effort}
            rewrite(make_plan(directory, fold_request(asked), statistics()), place)
        row["predicted"] = json.loads((place / "kvfold.json").read_text())["predicted_loss"]
    row |= measure(place if options else directory, train_BT, held_BT)
    file.write_text(json.dumps(row))
    click.echo(f"{label}: {row}", err=True)
    return row


def show(rows: dict[str, Row]) -> None:
    """Print the rows, and whether every fold with a fitted norm can be trained as its source can."""
    columns = ("before", *WAYS, *ROUNDINGS)
    table = [(label, *(f"{row[column]:.4f}" for column in columns)) for label, row in rows.items()]
    show_table(f"held-out loss after {STEPS} steps, and rounding errors", ("", *columns), table)
    for label, row in rows.items():
        if label != "source":
            worst = behind(row, rows["source"])
            click.echo(
                f"{label}: falls {max(worst, 0):.4f} nats behind the source ({WITHIN} are allowed); rounds "
                f"at most {rounds_worse(row, rows['source']):.2f} times as badly"
            )


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Training text, as for kvfold convert --calibration.")
@click.option("--eval-text", required=True, help="Held-out text, likewise.")
@click.option("--calibration", default="self", show_default=True, help="As for kvfold convert.")
@click.option("--kv-budget", multiple=True, default=["50%", "25%", "12.5%"], show_default=True)
@click.option(
    "--contrast", default="25%", show_default=True, help="Budget of a linear norm and of own code; none."
)
@click.option("--window", default=256, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=32, show_default=True, help="Held-out windows.")
@click.option("--effort", type=click.Choice(list(EFFORTS)), default="default", show_default=True)
@click.option("--refine", type=int, help="As for kvfold convert; left out, as the effort says.")
@click.option("--only", multiple=True, help="A row's label; all rows by default.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory that keeps folds and rows for a later run; a temporary one by default.",
)
@click.option("--name", required=True, help="Results go to benchmarks/results/trainable-NAME.json.")
def main(
    model: str,
    text: str,
    eval_text: str,
    calibration: str,
    kv_budget: tuple[str, ...],
    contrast: str,
    window: int,
    windows: int,
    effort: str,
    refine: int | None,
    only: tuple[str, ...],
    work: Path | None,
    name: str,
) -> None:
    """Print and save what training and rounding make of a source and its folds."""
    directory = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    train_BT = read_sequences(text, tokenizer, sequences=STEPS * BATCH, length=window, seed=0)
    held_BT = read_sequences(eval_text, tokenizer, sequences=windows, length=window, seed=0)
    taken: dict[str, Any] = {"effort": effort} | ({} if refine is None else {"refine": refine})
    wanted = labels(kv_budget, None if contrast == "none" else contrast)
    with tempfile.TemporaryDirectory() as temporary:
        place = work or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)

        @cache
        def statistics() -> Statistics:
            return study(open_source(directory), calibration, sequences=48, length=window, seed=0)

        rows = {
            label: measure_row(directory, place, label, options, statistics, taken, train_BT, held_BT)
            for label, options in wanted.items()
            if not only or label in only
        }
    if "source" not in rows:
        return
    show(rows)
    about = {
        "model": Path(model).name,
        "text": Path(text).name,
        "eval_text": Path(eval_text).name,
        "steps": STEPS,
        "batch": BATCH,
        "window": window,
        "windows": windows,
        **taken,
    }
    click.echo(f"saved in {save(f'trainable-{name}', {**about, 'rows': rows})}")


if __name__ == "__main__":
    main()
