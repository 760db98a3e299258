"""Dropout of attention weights in own code: a fold drops them in training where its source does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.support import support
from kvfold.models.decoder import is_attention
from kvfold.models.shipped.layers_kvfold import dropout_of
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ..support.folds import fold_latent
from ..support.tiny import make

RATE = 0.5
# Attention alone is random in training; families know some of these names.
QUIET = ("dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop",
         "router_jitter_noise", "input_jitter_noise")  # fmt: skip
SETTINGS: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "attention_dropout": RATE, "attn_pdrop": RATE, **dict.fromkeys(QUIET, 0.0),
}  # fmt: skip
IN_OWN_CODE = [
    kind
    for kind in FAMILIES
    if any(cell.container == "remote" and cell.status != "no" for cell in support(kind))
]
# The name of the rate differs between these families. GPT-2 and OPT do not rotate.
FORMS = [(kind, "decoupled") for kind in ("llama", "gpt2", "gptj", "opt", "gpt_neox", "falcon")]
FORMS += [("llama", "intact"), ("falcon", "intact")]
# Transformers' Falcon with rotation drops in flash attention alone; its fold does in all attention functions.
FLASH_ALONE = {"falcon"}


def is_random(model: Any) -> bool:
    """Return whether two passes in training mode differ."""
    ids = torch.arange(20)[None] * 7 % 97
    model.train()
    with torch.no_grad():
        return not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def fold(source: Path, form: str) -> Path:
    return fold_latent(source, "--rank", "full", "--container", "remote", "--rope", form)


@pytest.mark.parametrize("kind", IN_OWN_CODE)
def test_the_rate_is_found_where_the_source_drops(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path / "source", kind, **SETTINGS))
    rates = {dropout_of(module) for module in model.modules() if is_attention(module)}
    assert max(rates) == (RATE if kind in FLASH_ALONE or is_random(model) else 0.0)


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_a_fold_is_random_in_training_as_its_source_is(kind: str, form: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", kind, **SETTINGS)
    assert is_random(AutoModelForCausalLM.from_pretrained(source)) is (kind not in FLASH_ALONE)
    assert is_random(KvfoldForCausalLM.from_pretrained(fold(source, form)))


def test_a_fold_without_dropout_is_not_random(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "falcon", **{**SETTINGS, "attention_dropout": 0.0})
    assert not is_random(KvfoldForCausalLM.from_pretrained(fold(source, "decoupled")))


def test_trainer_trains_a_folded_falcon(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    source = make(tmp_path / "source", "falcon", **SETTINGS)
    model = KvfoldForCausalLM.from_pretrained(fold(source, "decoupled"), dtype=torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = torch.arange(2 * 16).reshape(2, 16) * 7 % 97
    settings = TrainingArguments(
        output_dir=str(tmp_path / "trained"), max_steps=1, learning_rate=1e-2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
    changed = {
        name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert any("kv_b_proj" in name for name in changed)
