"""Loaded models are whole, and only models that read a text alike are compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.models.causal_lm import check_comparable, load
from kvfold.texts.corpus import Text

from .conftest import Make

CPU = Options(device="cpu")


def test_auto_is_float32_on_a_cpu_and_bfloat16_can_be_asked_for(make: Make) -> None:
    half = make(dtype=torch.bfloat16)
    assert load(half, CPU).model.dtype == torch.float32
    assert load(half, Options(device="cpu", dtype="bfloat16")).model.dtype == torch.bfloat16
    assert not load(half, CPU).model.training


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"),
     "1 weight is missing or misshapen"),
    (
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 2)}),
        r"1 weight is missing or misshapen, e.g. lm_head.weight, which has shape \(2, 2\) where config.json "
        "implies",
    ),
])  # fmt: skip
def test_weights_that_transformers_would_invent_are_refused(
    make: Make, spoil: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    directory = make()
    tensors = load_file(directory / "model.safetensors")
    spoil(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=message):
        load(directory, CPU)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no config"):
        load(tmp_path, CPU)
    with pytest.raises(InvalidInput, match="is not a directory"):
        load(tmp_path / "absent", CPU)


@pytest.mark.parametrize(("file", "content"), [
    ("model.safetensors", None),
    ("model.safetensors", "no tensors"),
    ("tokenizer.json", None),
    ("tokenizer.json", "{}"),
    ("config.json", "no JSON"),
    ("config.json", "{}"),
    ("config.json", '{"model_type": "unheard-of"}'),
    ("config.json", '{"model_type": "llama", "hidden_size": 33, "num_attention_heads": 4}'),
    ("config.json", '{"model_type": "t5"}'),
])  # fmt: skip
def test_a_damaged_checkpoint_is_refused_in_one_line(make: Make, file: str, content: str | None) -> None:
    directory = make()
    (directory / file).unlink()
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(
        InvalidInput,
        match=r"cannot be loaded|has no safetensors weights|is not JSON|is no causal language model",
    ) as caught:
        load(directory, CPU)
    assert "\n" not in str(caught.value)


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(make: Make) -> None:
    directory = make()
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(InvalidInput, match=r"cannot be loaded.*custom code"):
        load(directory, CPU)
    assert type(load(directory, Options(device="cpu", trust_remote_code=True)).model).__name__ == "Own"


def test_cuda_is_refused_where_there_is_none(mha: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInput, match="--device cuda: torch finds no CUDA device here"):
        load(mha, Options(device="cuda"))


@pytest.mark.parametrize("changes", [{"last": "fin"}, {"bos": None, "vocab_size": 257}])
def test_other_tokenizers_cannot_teach(make: Make, mha: Path, text: Text, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="have different tokenizers"):
        evaluate(mha, make(**changes), text, CPU)


def test_vocabularies_may_differ_by_padding_only(make: Make, mha: Path, text: Text) -> None:
    padded = make(vocab_size=320)
    assert evaluate(mha, padded, text, CPU).fidelity is not None
    with pytest.raises(InvalidInput, match=r"258 logits and .* 257, but their tokenizer has 258 entries"):
        check_comparable(load(mha, CPU), load(make(vocab_size=257), CPU), text.joined)
