"""Training of outputs with ordinary tools, and their rounding: `python -m benchmarks.trainable MODEL --text A
--eval-text B`.

The source and its folds with a fitted and with a linear latent norm, and with code of their own, are trained
for ten steps by AdamW with clipped gradients, by `transformers.Trainer` with gradient checkpointing, and by
PEFT's LoRA on all linear layers. Losses are on the same held-out windows before and after. Rounding is the
mean change of log-probabilities against float32.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from kvfold.convert.calibration.study import study
from kvfold.convert.decide.plan import make_plan
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.refinement import STEPS
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.texts.documents import read_sequences

from .machine import save

FOLDS = {
    "fitted": {"container": "stock", "latent_norm": "fitted"},
    "linear": {"container": "stock", "latent_norm": "linear"},
    "remote": {"container": "remote"},
}
STEPS_TRAINED, BATCH, CLIP = 10, 8, 1.0
RATES = (1e-4, 2e-4)
LORA_RATE = 2e-4


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a checkpoint's model, as a user of transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=True)


@torch.no_grad()
def held_out_loss(model: Any, tokens_BT: Tensor) -> float:
    """Return the cross entropy of a model, nats per token."""
    model.eval()
    parts = [float(model(part, labels=part).loss) * len(part) for part in tokens_BT.split(BATCH)]
    return sum(parts) / len(tokens_BT)


def train_plainly(model: Any, tokens_BT: Tensor, rate: float) -> Any:
    """Train all weights by AdamW for one pass over the windows, gradients clipped; return the model."""
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
            learning_rate=rate,
            lr_scheduler_type="constant", max_grad_norm=CLIP, gradient_checkpointing=True,
            use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, seed=0,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=_Windows(tokens_BT)).train()
    return model


def train_adapters(model: Any, tokens_BT: Tensor, rate: float) -> Any:
    """Train LoRA adapters on all linear layers by AdamW; return the model with the adapters merged."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    return train_plainly(adapted, tokens_BT, rate).merge_and_unload()


WAYS: dict[str, tuple[Callable[[Any, Tensor, float], Any], float]] = {
    **{f"AdamW {rate:g}": (train_plainly, rate) for rate in RATES},
    **{f"Trainer {rate:g}": (train_by_trainer, rate) for rate in RATES},
    f"LoRA {LORA_RATE:g}": (train_adapters, LORA_RATE),
}


@torch.no_grad()
def rounding(directory: Path, dtype: torch.dtype, tokens_BT: Tensor) -> float:
    """Return the mean |change| of log-probabilities that a dtype makes, nats."""
    exact, rounded = (
        load(directory, kind)(tokens_BT).logits.float().log_softmax(-1) for kind in (torch.float32, dtype)
    )
    return float((rounded - exact).abs().mean())


def measure(directory: Path, train_BT: Tensor, held_BT: Tensor) -> dict[str, float]:
    """Return one checkpoint's losses before and after every way of training, and its rounding."""
    found = {"before": held_out_loss(load(directory), held_BT)}
    for way, (train, rate) in WAYS.items():
        found[way] = held_out_loss(train(load(directory), train_BT, rate), held_BT)
    for dtype in (torch.float16, torch.bfloat16):
        found[f"{str(dtype).removeprefix('torch.')} rounding"] = rounding(directory, dtype, held_BT[:4])
    return found


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Training text, as for kvfold convert --calibration.")
@click.option("--eval-text", required=True, help="Held-out text, likewise.")
@click.option("--calibration", default="self", show_default=True, help="As for kvfold convert.")
@click.option("--kv-budget", multiple=True, default=["25%"], show_default=True)
@click.option(
    "--window",
    default=256,
    show_default=True,
    help="Tokens of every window, of calibration and training too.",
)
@click.option("--windows", default=64, show_default=True, help="Held-out windows.")
@click.option("--refine", default=STEPS, show_default=True, help="As for kvfold convert.")
@click.option("--name", required=True, help="Results go to benchmarks/results/trainable-NAME.json.")
def main(
    model: str,
    text: str,
    eval_text: str,
    calibration: str,
    kv_budget: tuple[str, ...],
    window: int,
    windows: int,
    refine: int,
    name: str,
) -> None:
    """Print and save what training and rounding make of a source and its folds."""
    directory = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    train_BT = read_sequences(text, tokenizer, sequences=STEPS_TRAINED * BATCH, length=window, seed=0)
    held_BT = read_sequences(eval_text, tokenizer, sequences=windows, length=window, seed=0)
    statistics = study(open_source(directory), calibration, sequences=48, length=window, seed=0)
    rows = {"source": measure(directory, train_BT, held_BT)}
    with tempfile.TemporaryDirectory() as work:
        for budget in kv_budget:
            for label, options in FOLDS.items():
                out = Path(work) / f"{label}-{budget}"
                plan = make_plan(
                    directory, "mla", {"kv_budget": budget, **options}, None, "float32", statistics, refine
                )
                record = rewrite(plan, out, "benchmarks.trainable")
                row = {"predicted": record["predicted_loss"], **measure(out, train_BT, held_BT)}
                rows[f"{label} {budget}"] = row
                click.echo(f"{label} {budget}: {row}", err=True)
    columns = [column for column in rows[f"fitted {kv_budget[0]}"] if column != "predicted"]
    table = [(label, *(f"{row[column]:.4f}" for column in columns)) for label, row in rows.items()]
    show_table(f"held-out loss after {STEPS_TRAINED} steps", ("", *columns), table)
    about = {
        "text": Path(text).name,
        "eval_text": Path(eval_text).name,
        "window": window,
        "windows": windows,
        "refine": refine,
    }
    click.echo(f"saved in {save(f'trainable-{name}', {**about, 'rows': rows})}")


if __name__ == "__main__":
    main()
