"""LoRA on the layers that docs/serve.md and the model card name."""

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from ...support.folds import fold_latent
from ...support.tiny import make

PAGE = Path(__file__).parents[3] / "docs" / "serve.md"
STOCK = ("--container", "stock", "--kv-budget", "50%", "--calibration", "self", "--sequences", "4")
FITTED = (*STOCK, "--length", "32", "--refine", "0", "--latent-norm", "fitted")
OWN = ("--container", "remote", "--kv-budget", "50%")
# Label of a row of the page, the family of the source, the options of the fold.
OUTPUTS = {
    "stock": ("MLA in the stock class", "llama", FITTED),
    "stock, compressed queries": ("MLA in the stock class", "llama", (*FITTED, "--q-lora-rank", "16")),
    "stock, biases": ("MLA in the stock class", "qwen2", FITTED),
    "decoupled": ("MLA with its own code, `--rope decoupled`", "llama", OWN),
    "decoupled, key norms": ("MLA with its own code, `--rope decoupled`", "qwen3",
                             (*OWN, "--rope", "decoupled")),
    "intact": ("MLA with its own code, `--rope intact`", "llama", (*OWN, "--rope", "intact")),
}  # fmt: skip


def names_in(words: str) -> list[str]:
    return re.findall(r"`(\w+)`", words)


def told_by_page(label: str, kind: str) -> set[str]:
    rows = dict(re.findall(r"^\| (MLA [^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    usual, _, extra = rows[label].partition("(")
    if "the same" in usual:
        usual = rows["MLA in the stock class"]
    names = {name for name in names_in(usual) if name.endswith(("_proj", "_mqa"))}
    if "key norms" in kind:
        names |= {name for name in names_in(extra) if name.endswith("_proj")}
    if kind in ("stock, compressed queries", "stock, biases"):
        names = (names - {"q_proj"}) | {"q_a_proj", "q_b_proj"}
    return names


@pytest.mark.parametrize("kind", OUTPUTS)
def test_adapters_go_where_the_page_and_the_card_say(kind: str, tmp_path: Path) -> None:
    label, family, options = OUTPUTS[kind]
    out = fold_latent(make(tmp_path / "source", family, hidden_size=64), *options)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=True)
    attention = model.model.layers[0].self_attn
    linear = {name for name, module in attention.named_modules() if isinstance(module, nn.Linear)}
    card = (out / "README.md").read_text(encoding="utf-8")
    every = {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    }
    if label == "MLA in the stock class":
        told = re.search(r"`target_modules` are (.+), and `target_parameters` are (.+): PEFT", card)
        parameters = re.findall(r"`([\w.]+)`", told[2])
        (named,) = re.findall(r"target_parameters=\[(.+)\]", PAGE.read_text(encoding="utf-8"))
        assert sorted(parameters) == sorted(named.replace('"', "").split(", "))
        targets = {"target_modules": names_in(told[1]), "target_parameters": parameters}
    else:
        told = re.search(r"`target_modules` are `all-linear`, or some of (.+)\.", card)
        assert told is not None
        targets = {"target_modules": "all-linear"}
    assert set(names_in(told[1])) == linear
    assert told_by_page(label, kind) == linear

    whole = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, task_type="CAUSAL_LM", **targets))
    assert every == {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.default")
        for name, _ in whole.named_modules()
        if name.endswith(".lora_A.default")
    }

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=sorted(linear), task_type="CAUSAL_LM"))
    tokens = torch.arange(20)[None]
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    gradients = {
        name: weight.grad
        for name, weight in adapted.named_parameters()
        if name.endswith("lora_B.default.weight")
    }
    assert len(gradients) == len(linear) * len(model.model.layers)
    assert all(grad is not None and grad.abs().max() > 0 for grad in gradients.values())
