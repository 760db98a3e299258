"""Rotary tables of own code: the decoder's is replaced, wherever the configuration says that the decoder is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlamaModel

from kvfold.models.shipped.layers_kvfold import KvfoldRotaryEmbedding
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM, KvfoldModel

from ..support.folds import fold_latent
from ..support.tiny import make

IDS = torch.arange(40)[None] * 7 % 97


def fold(source: Path) -> Path:
    return fold_latent(source, "--kv-budget", "50%", "--container", "remote")


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fold(make(tmp_path_factory.mktemp("rotary") / "source"))


def test_a_class_prefix_need_not_name_its_decoder(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Llama 4, whose text class has the prefix `language_model` and its decoder in `model`."""
    expected = logits(KvfoldForCausalLM.from_pretrained(out))
    monkeypatch.setattr(LlamaForCausalLM, "base_model_prefix", "language_model")
    model = KvfoldForCausalLM.from_pretrained(out)
    assert isinstance(model.model.rotary_emb, KvfoldRotaryEmbedding)
    assert torch.equal(logits(model), expected)


def test_a_table_that_is_not_found_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = LlamaModel.__init__

    def renamed(self: Any, config: Any) -> None:
        stock(self, config)
        self.turns = self._modules.pop("rotary_emb")

    monkeypatch.setattr(LlamaModel, "__init__", renamed)
    with pytest.raises(ValueError, match=r"LlamaModel of transformers \S+ has no rotary table"):
        KvfoldForCausalLM.from_pretrained(out)


def test_names_without_the_prefix_of_the_head_are_found(tmp_path: Path) -> None:
    """As of the first GPT-2 checkpoints, with a head and without one."""
    source = make(tmp_path / "source", "gpt2", hidden_size=64)
    whole = fold(source)
    expected = logits(KvfoldForCausalLM.from_pretrained(whole))
    tensors = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, source / "model.safetensors", {"format": "pt"})
    whole.rename(tmp_path / "whole")
    out = fold(source)
    model = KvfoldForCausalLM.from_pretrained(out)
    assert model.config.kvfold["attention"] == "h.{layer}.attn"
    assert torch.equal(logits(model), expected)
    with torch.no_grad():
        base, wanted = KvfoldModel.from_pretrained(out).eval(), model.base_model(input_ids=IDS)
        assert torch.equal(base(input_ids=IDS).last_hidden_state, wanted.last_hidden_state)
