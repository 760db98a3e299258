"""Peers' repositories: what a run names, and what comes back from a process of its own."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers import PeerRun, compare, read_run, score
from kvfold.core.errors import InvalidInput
from tests.support.tiny import make

# Two modules with the names and signatures of TransMLA's converter. The first keeps the batches that it gets;
# the second halves the values.
PARTIAL_ROPE = """
import torch

def partial_rope(model, tokenizer, train_loader, test_loader, **kwargs):
    assert kwargs["freqfold"] == kwargs["collapse"] == 2
    model.seen = torch.cat([batch["input_ids"] for batch in train_loader])
    return model
"""
LORA_QKV = """
import torch

def low_rank_qkv(model, tokenizer, train_loader, test_loader, **kwargs):
    assert kwargs["kv_lora_rank"] == 12 and kwargs["kv_decomp_method"] == "care"
    assert torch.equal(model.seen, torch.cat([batch["input_ids"] for batch in train_loader]))
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data /= 2
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("peers") / "source")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = torch.Generator().manual_seed(0)
    file = tmp_path_factory.mktemp("peers") / "tokens.pt"
    windows_NW = torch.randint(0, 97, (11, 16), generator=draw)
    scored_NT = torch.ones(11, 15, dtype=torch.bool)
    scored_NT[-1, 4:] = False
    calibration_BT = torch.randint(0, 97, (9, 12), generator=draw)
    torch.save({"calibration": calibration_BT, "windows": windows_NW, "scored": scored_NT}, file)
    return file


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "clone" / "src"
    place.mkdir(parents=True)
    (place / "partial_rope.py").write_text(PARTIAL_ROPE)
    (place / "lora_qkv.py").write_text(LORA_QKV)
    return place.parent


def test_a_peer_gets_the_tokens_and_is_scored_like_the_source(
    tmp_path: Path, source: Path, tokens: Path, repository: Path
) -> None:
    halved = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for layer in halved.model.layers:
            layer.self_attn.v_proj.weight /= 2
    halved.save_pretrained(tmp_path / "halved")
    runs = [
        read_run(f"stub care {repository} qk_mqa_dim=4 kv_lora_rank=12 kv_decomp_method=care"),
        read_run(f"written directory {tmp_path / 'halved'}"),
    ]
    rows = compare(runs, source, tokens, 154, sys.executable)
    assert abs(rows["stub"]["lost"]) > 1e-6
    assert rows["stub"]["lost"] == pytest.approx(rows["written"]["lost"], rel=1e-3)
    assert rows["stub"]["versions"] == rows["source"]["versions"]
    assert rows["stub"]["settings"] == {"qk_mqa_dim": 4, "kv_lora_rank": 12, "kv_decomp_method": "care"}
    kept = torch.load(tokens, weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        loss = model(input_ids=kept["windows"]).logits[:, :-1].log_softmax(-1)
    wanted = -loss.gather(-1, kept["windows"][:, 1:, None]).squeeze(-1)[kept["scored"]].double().mean()
    assert rows["source"]["loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_peer_that_fails_says_why(source: Path, tokens: Path, repository: Path) -> None:
    run = PeerRun(label="stub", adapter="transmla", repository=repository, settings={"qk_mqa_dim": 8})
    with pytest.raises(InvalidInput, match="stub: the peer's process failed: AssertionError"):
        score(run, source, tokens, sys.executable)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name", "no adapter ''"),
        ("name other .", "no adapter 'other'; choose from"),
        ("name care /nowhere", "there is no directory '/nowhere'"),
        ("name care . rank", "rank is no setting; write name=value"),
    ],
)
def test_a_run_that_is_misspelt(text: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        read_run(text)


def test_settings_are_numbers_where_they_look_like_it(tmp_path: Path) -> None:
    run = read_run(f"a mha2mla {tmp_path} low_rank=8 partial_rope_version=2-norm balance=0.5")
    assert (
        json.dumps(dict(run.settings)) == '{"low_rank": 8, "partial_rope_version": "2-norm", "balance": 0.5}'
    )
