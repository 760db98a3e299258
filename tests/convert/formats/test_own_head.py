"""A source whose config.json ties the head, and which stores another one: every fold keeps both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.checkpoints.directory import Checkpoint
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.source import open_source
from kvfold.engines.verify import verify
from kvfold.models.layered_model import LayeredModel

from ...support import folds
from ...support.tiny import make

pytestmark = pytest.mark.usefixtures("warm_probe")
FULL = ("--to", "mla", "--rank", "full")
FOLDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "stock": ("llama", {}, (*FULL, "--container", "stock")),
    "stock, norms with a constant": ("gemma", {}, (*FULL, "--container", "stock")),
    "decoupled": ("llama", {}, (*FULL, "--container", "remote")),
    "intact": ("llama", {}, (*FULL, "--rope", "intact")),
    "grouped": ("llama", {"num_key_value_heads": 4}, ("--to", "gqa", "--kv-heads", "4")),
    "falcon for neox": ("gpt_neox", {"num_key_value_heads": 8, "hidden_size": 64},
                        ("--to", "gqa", "--kv-heads", "8")),
    "bigcode for gpt2": ("gpt2", {"num_key_value_heads": 8}, ("--to", "gqa", "--kv-heads", "8")),
}  # fmt: skip


def untied(directory: Path, family: str, *, head: str = "other", **settings: Any) -> Path:
    """Save a tied checkpoint with a stored head: `other` numbers than the embeddings, or the `same`."""
    make(directory, family, tie_word_embeddings=True, **settings)
    row, tensors = FAMILIES[family], load_file(directory / "model.safetensors")
    embedding = tensors[row.prefix + row.embedding]
    torch.manual_seed(1)
    other = 0.3 * torch.randn(embedding.shape)
    tensors[row.head] = other.to(embedding.dtype) if head == "other" else embedding.clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def convert(source: Path, out: Path, *options: str) -> Path:
    folds.convert(source, *options, *folds.WEIGHTS, out=out, code=0)
    return out


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False
    ).eval()


def test_transformers_keeps_a_head_that_is_not_the_embeddings(tmp_path: Path) -> None:
    for head in ("other", "same"):
        directory = untied(tmp_path / head, "llama", head=head)
        model, stored = loaded(directory), load_file(directory / "model.safetensors")
        assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (head == "same")
        assert open_source(directory).config["tie_word_embeddings"] == (head == "same")


@pytest.mark.parametrize("fold", FOLDS)
def test_every_container_keeps_it(fold: str, tmp_path: Path) -> None:
    """A fold that keeps everything is exact against the source as transformers loads it."""
    family, settings, options = FOLDS[fold]
    source = untied(tmp_path / "source", family, **settings)
    out = convert(source, tmp_path / "out", *options)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    report = verify(out)
    assert report.failures == []
    assert {check.name: check.passed for check in report.checks}["source"] is True
    assert report.measured["kl"] < 1e-9


@pytest.mark.parametrize("container", ["stock", "remote"])
def test_verify_judges_what_16_bits_keep(container: str, tmp_path: Path) -> None:
    """A bfloat16 fold that keeps everything passes; with the head dropped it fails."""
    source = untied(tmp_path / "source", "llama", dtype=torch.bfloat16)
    out = convert(source, tmp_path / "out", *FULL, "--container", container)
    assert {check.name: check.passed for check in verify(out).checks}["source"] is True
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    del tensors["lm_head.weight"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    (failure,) = verify(out).failures
    assert failure.startswith("source: KL")
    assert "it keeps everything" in failure


def test_compressed_queries_claim_nothing(tmp_path: Path) -> None:
    """With fewer numbers for queries the distance is measured, and not held to be zero."""
    source = make(tmp_path / "source", "llama")
    for rank, judged in (("8", None), ("full", True)):
        out = convert(source, tmp_path / rank, *FULL, "--container", "remote", "--q-lora-rank", rank)
        assert {check.name: check.passed for check in verify(out).checks}["source"] is judged


def test_a_head_that_is_the_embeddings_stays_tied(tmp_path: Path) -> None:
    out = convert(
        untied(tmp_path / "source", "llama", head="same"), tmp_path / "out", *FULL, "--container", "stock"
    )
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(out / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_layer_by_layer_it_is_the_same_model(family: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {} if family == "llama" else {"num_key_value_heads": 8, "hidden_size": 64}
    source = untied(tmp_path / "source", family, **settings)
    layered = LayeredModel(Checkpoint(source))
    layered.check_complete()
    ids = torch.arange(24)[None].to(layered.device)
    with torch.no_grad(), layered.streamed(1) as model:
        apart = model(input_ids=ids).logits.cpu() - loaded(source)(input_ids=ids.cpu()).logits
    assert apart.abs().max() < 1e-5
