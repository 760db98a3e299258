"""Peers' repositories: what a run names, and what comes back from a process of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peer_process import norm_ranks
from benchmarks.peer_settings import SWEEPS, first_settings
from benchmarks.peers import Bench, PeerRun, joined, read_run, score, sweep, updated
from kvfold.convert.algebra.target import Geometry
from kvfold.core.errors import InvalidInput

from ..support.tiny import make
from ..support.warm_python import warm_python

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
    bench = Bench(model=source, tokens=tokens, scored=154, python=warm_python())
    base_N, own = bench.source()
    rows = {"source": own} | {run.label: bench.row(run, base_N) for run in runs}
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
        score(run, source, tokens, warm_python())


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


GEOMETRY = Geometry(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=16)


@pytest.mark.parametrize("adapter", SWEEPS)
@pytest.mark.parametrize("elements", [64, 32, 16])
def test_every_setting_caches_what_it_should(adapter: str, elements: int) -> None:
    tried = first_settings(adapter, GEOMETRY, elements)
    assert tried
    assert len({json.dumps(settings) for settings in tried}) == len(tried)
    for settings in tried:
        if adapter == "mha2mla":
            ranks = 2 if settings["svd_init_method"] == "split" else 1
            assert 4 * (settings["rope_dim_for_mla"] + ranks * settings["low_rank"]) == elements
        else:
            rotary = settings["qk_rope_head_dim" if adapter == "xecomla" else "qk_mqa_dim"]
            assert rotary + settings["kv_lora_rank"] == elements


def test_a_sweep_finds_the_best_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fold of 4 with a balance of 2 is best; balances are tried with the best of the other settings."""

    def pretended(run: PeerRun, *_: object) -> dict[str, Any]:
        settings = run.settings
        if settings["freqfold"] == 8:
            raise InvalidInput("the peer's process failed")
        lost = abs(settings["qk_mqa_dim"] - 8) + abs(settings.get("balance_kv_ratio", 1) - 2)
        lost += settings["freqfold"] != 4
        return {"nll": [1.0 + lost, 2.0 + lost], "versions": {}}

    monkeypatch.setattr("benchmarks.peers.score", pretended)
    bench = Bench(model=tmp_path, tokens=tmp_path, scored=2, python="python")
    row = sweep("care", tmp_path, GEOMETRY, "50%", bench, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert row is not None
    assert row["lost"] == 0
    assert row["standard_error"] == 0
    assert row["settings"]["qk_mqa_dim"] == 8
    assert row["settings"]["freqfold"] == 4
    assert row["settings"]["balance_kv_ratio"] == 2
    assert [settings.rpartition("=")[2] for settings in row["tried"] if "balance" in settings] == [
        "0.5",
        "2.0",
        "4.0",
    ]
    assert not any("freqfold=8" in settings for settings in row["tried"])


def test_an_adapter_without_a_sweep() -> None:
    with pytest.raises(InvalidInput, match="--sweep has no settings for 'directory'; choose from transmla"):
        first_settings("directory", GEOMETRY, 64)


def test_rows_of_an_earlier_run_are_kept_where_it_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.RESULTS", tmp_path)
    first = {"protocol": "text", "calibration": [1], "rows": {"source": {"loss": 1.0}, "a": {"lost": 0.1}}}
    assert updated("tiny", first) == first
    (tmp_path / "peers-tiny.json").write_text(json.dumps(first))
    second = {**first, "rows": {"source": {"loss": 1.0}, "b": {"lost": 0.2}}}
    assert list(updated("tiny", second)["rows"]) == ["source", "a", "b"]
    for other in ({**second, "protocol": "another"}, {**second, "rows": {"source": {"loss": 1.1}}}):
        with pytest.raises(InvalidInput, match=r"peers-tiny.json has"):
            updated("tiny", other)


def test_of_equal_labels_the_best_is_the_row() -> None:
    """All settings that were tried stay with it; a label may have several words."""
    run = read_run(f"'care 50%' care {Path(__file__).parent} freqfold=1")
    assert (run.label, run.settings) == ("care 50%", {"freqfold": 1})
    with pytest.raises(InvalidInput, match="a quote is not closed"):
        read_run("'care 50% care .")
    rows = [{"lost": lost, "settings": {"rank": rank}} for lost, rank in ((0.3, 1), (0.1, 2), (0.2, 3))]
    row: dict[str, Any] | None = None
    for one in rows:
        row = joined(row, one)
    assert row == {**rows[1], "tried": {"rank=1": 0.3, "rank=2": 0.1, "rank=3": 0.2}}


def test_pairs_are_ranked_by_norm(source: Path) -> None:
    """A pair whose keys grow is the first of its head."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    keys = model.model.layers[0].self_attn.k_proj
    with torch.no_grad():
        keys.weight[8 + 2] *= 100  # head 1 of width 8, pair 2
        ranks = norm_ranks(model, torch.randint(0, 97, (9, 12), generator=torch.Generator().manual_seed(0)))
    assert ranks.shape == (2, 8, 8)
    assert ranks[0, 1, 2] == ranks[0, 1, 6] == 0
    assert torch.equal(ranks[..., :4], ranks[..., 4:])
    assert torch.equal(ranks[..., :4].sort(-1).values, torch.arange(4).expand(2, 8, 4))
