"""Ten optimizer steps on a loaded model, as users of transformers and PEFT take them, without kvfold."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

STEPS = 10
BATCH = 4
CLIP = 1.0
RATES = (1e-4, 2e-4)


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
