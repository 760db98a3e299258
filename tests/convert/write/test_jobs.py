"""Layers at work at once: the same bytes, within memory, and what is read on the way."""

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.convert.calibration.capacity import default_jobs, fold_bytes
from kvfold.convert.decide.plan import Plan
from kvfold.convert.families.source import open_source
from kvfold.convert.layer.fold import LayerFold
from kvfold.convert.layer.threads import fold_threads
from kvfold.convert.write import rewrite

from ...support.folds import GQA, MLA, convert
from ...support.tiny import make, same_bytes


@pytest.mark.parametrize(
    "options",
    [GQA, MLA, ("--to", "mla", "--rank", "9", "--length", "12", "--sequences", "4", "--refine", "3")],
)
def test_layers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    """However many layers are at work, and with whatever threads torch would use."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    if "--refine" in options:  # statistics may depend on threads: both folds get the same ones
        saved = tmp_path / "statistics.safetensors"
        convert(source, *options, "--save-statistics", str(saved), out=tmp_path / "zero", code=0)
        options = (*options[:4], "--calibration", str(saved), *options[-2:])
    assert convert(source, *options, "--jobs", "1", out=tmp_path / "one").exit_code == 0
    at_once, meeting, fold = set(), threading.Barrier(2, timeout=60), rewrite.fold

    def met(plan: Plan, number: int) -> LayerFold:
        at_once.add(threading.current_thread().name)
        meeting.wait()  # broken unless two layers are at work
        return fold(plan, number)

    monkeypatch.setattr(rewrite, "fold", met)
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (
            convert(source, *options, "--jobs", "2", "--shard-size", "5GB", out=tmp_path / "two").exit_code
            == 0
        )
        assert torch.get_num_threads() == 2, "threads are not given back"
    finally:
        torch.set_num_threads(usual)
    assert len(at_once) == 2
    assert same_bytes(tmp_path / "one", tmp_path / "two") == []


def test_jobs_are_bounded_by_memory_and_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(make(tmp_path / "source", num_hidden_layers=3))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert default_jobs(source, None) == 3
    need = fold_bytes(source)
    assert need >= 8 * 4 * source.geometry.hidden_size**2, "a layer's attention alone takes more"
    assert fold_bytes(source, (4, 64)) > need
    normed = fold_bytes(source, (4, 64), levelled=64) - need
    assert normed >= 8 * 4 * 64 * (source.geometry.hidden_size + 6 * 64), "a norm is fitted in float64"
    assert fold_bytes(source, (4, 64), levelled=1) >= fold_bytes(source, (4, 64))
    prepared = fold_bytes(source, (4, 64), levelled=64, stored=64) - need
    assert prepared == normed + 8 * 4 * 64 * 6 * 64, "so is a format of the cache, next to it"
    monkeypatch.setattr("kvfold.convert.calibration.capacity.system_bytes", lambda: 2 * need)
    assert default_jobs(source, None) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_jobs(source, None) == 1


def test_memory_grows_with_the_length_but_for_bounded_scores(tmp_path: Path) -> None:
    """The fused kernel forms no scores of all pairs of tokens; a bound on them and sinks need them."""

    def growth(family: str, name: str = "", **settings: Any) -> float:
        source = open_source(make(tmp_path / (name or family), family, **settings))
        none, short, long = (fold_bytes(source, (4, length)) for length in (0, 4096, 8192))
        return (long - none) / (short - none)

    assert growth("llama") == 2
    assert growth("gemma2") > 3.5
    assert growth("gpt_oss") > 3.5
    mixed = ["sliding_attention", "full_attention"]
    first, last = (growth("ministral", kinds[0], layer_types=kinds) for kinds in (mixed, mixed[::-1]))
    assert first == last > 3.5, "the mask of a window, whichever layers have it"


def test_the_record_has_the_hash_of_every_source_file(tmp_path: Path) -> None:
    source = make(tmp_path / "source", shard_size="20KB")
    assert convert(source, *GQA, "--jobs", "2").exit_code == 0
    recorded = json.loads((tmp_path / "out" / "kvfold.json").read_text())["source"]["files"]
    weights = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.glob("*.safetensors")
    }
    assert len(weights) > 3
    assert weights.items() <= recorded.items()


def full(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("the GPU is full")


def test_a_gpu_decomposes_once_before_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch loads its library for that at the first use, and fails where two threads do it at once."""
    said, ones = list[str](), torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(f"thread on {device}"))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    for name in ("inv", "eigh", "solve", "cholesky", "cholesky_ex"):
        monkeypatch.setattr(torch.linalg, name, lambda *_: said.append("decomposition"))
    with fold_threads(2) as pool:
        assert pool.submit(lambda: 7).result() == 7
    assert said == ["decomposition", "thread on 0"]
    monkeypatch.setattr(torch, "ones", full)
    with fold_threads(2) as pool:
        assert pool.submit(lambda: 7).result() == 7


@pytest.mark.parametrize(("place", "remedy"), [
    ("kvfold.convert.calibration.study._collect", "one layer at a time with --layerwise"),
    ("kvfold.convert.write.rewrite.fold", "fold fewer layers at once with --jobs 1"),
])  # fmt: skip
def test_a_full_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, remedy: str) -> None:
    source, sizes = make(tmp_path / "source"), ("--length", "8", "--sequences", "2", "--refine", "0")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(place, full)
    result = convert(source, "--to", "gqa", "--kv-heads", "2", *sizes, code=2)
    sentence = result.output.splitlines()[-1]
    assert sentence.startswith("Error: the GPU has too little memory (2.00 GiB more were needed); ")
    assert remedy in sentence
