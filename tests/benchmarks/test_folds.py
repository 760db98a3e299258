"""The commands that try folds on engines: what they try is what they say, and what is wrong is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from benchmarks import cuda_check, engine_rows, vllm
from benchmarks.folds import DEMO, FOLDS, Fold, make_folds, widen
from kvfold.core.errors import InvalidInput
from kvfold.verification.fresh_process import Check
from kvfold.verification.verify import VerificationReport


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fold, Path, Path]:
    (one,) = make_folds(tmp_path_factory.mktemp("folds"), "qwen3 --to gqa")
    return one


def test_wider_heads_compute_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wide = widen(DEMO, tmp_path / "wide", 64)
    ids = torch.arange(40)[None]
    narrow, wider = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits for path in (DEMO, wide)
    )
    assert (narrow - wider).abs().max() < 1e-4 * narrow.std()
    with pytest.raises(InvalidInput, match="40 is no multiple"):
        widen(DEMO, tmp_path / "other", 40)


def test_a_fold_in_transformers(made: tuple[Fold, Path, Path], tmp_path: Path) -> None:
    """An exact fold passes; a changed weight and a changed claim are told."""
    fold, source, out = made
    row = cuda_check.run(fold, source, out, "cpu", ["eager", "sdpa"])
    assert row["failures"] == []
    assert row["bfloat16"].keys() == {"eager", "sdpa"}
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1.01
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    record = (out / "kvfold.json").read_text()
    (tmp_path / "kvfold.json").write_text(
        record.replace('"elements_per_token_per_layer": 256', '"elements_per_token_per_layer": 2')
    )
    first, second = cuda_check.run(fold, source, tmp_path, "cpu", [])["failures"]
    assert "from the source's" in first
    assert "[256.0] elements per token and layer are cached, not 2" in second


def test_rounding_has_a_measure() -> None:
    fine = {"kl": 5e-4, "greedy_gap": 0.0}
    assert cuda_check._rounded(fine, 1e-4, 1.0) == []
    assert "rounding costs the source" in cuda_check._rounded({**fine, "kl": 2e-3}, 1e-4, 1.0)[0]
    assert "rounding costs the source" in cuda_check._rounded({**fine, "kl": float("nan")}, 1e-4, 1.0)[0]
    assert "fall short" in cuda_check._rounded({**fine, "greedy_gap": 0.5}, 1e-4, 1.0)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("device", "code"), [("auto", 0), ("cuda", 2)])
def test_without_a_gpu(device: str, code: int) -> None:
    result = CliRunner().invoke(cuda_check.main, ["--device", device])
    assert result.exit_code == code
    assert "no CUDA device here" in result.output


GOOD = {"max_difference": 1e-6, "mean_difference": 1e-7, "same_tokens": 64, "tokens": 64}


@pytest.mark.parametrize(
    ("fold", "measured", "cache", "words"),
    [
        ({}, {}, True, ""),
        ({}, {"source": {**GOOD, "max_difference": 0.01}}, True, "from the source's"),
        ({"exact": False}, {"source": {**GOOD, "max_difference": 0.01}}, True, ""),
        ({}, {"source": {**GOOD, "same_tokens": 63}}, True, "greedy tokens"),
        ({}, {"dtype": "bfloat16", "source": {**GOOD, "max_difference": 0.2, "same_tokens": 3}}, True, ""),
        ({}, {"dtype": "bfloat16", "source": {**GOOD, "mean_difference": 0.2}}, True, "from the source's"),
        ({}, {}, None, "512 elements"),
        ({"as_claimed": False}, {}, None, ""),
        ({"as_claimed": False}, {}, True, "512 elements"),
        ({}, None, True, "was not started"),
        ({}, None, False, "no kernel"),
    ],
)
def test_what_vllm_says_is_judged(
    fold: dict[str, Any],
    measured: dict[str, Any] | None,
    cache: bool | None,
    words: str,
    made: tuple[Fold, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an exact fold against its source; the cache must be compressed where it can be."""
    numbers = (
        {}
        if measured is None
        else {"vllm": {"dtype": "float32", "own": GOOD, "source": GOOD, "cache": 256.0} | measured}
    )
    checks = (Check("vllm cache", cache, "512 elements"),) if measured is not None else ()
    if measured is None and not cache:
        checks = (Check("loads", False, "no kernel"),)
    report = VerificationReport(made[2], ("vllm",), (), checks, numbers, ("vllm was not started",))
    monkeypatch.setattr(engine_rows, "verify", lambda *_: report)
    failures = engine_rows.run_fold(replace(made[0], **fold), made[1], made[2], "vllm")["failures"]
    assert (words in failures[0]) if words else failures == []


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda _: None)
    result = CliRunner().invoke(vllm.main, [])
    assert result.exit_code == 2
    assert "make test-vllm" in result.output


def test_what_is_tried() -> None:
    """Every kind of output, exact and trained."""
    assert {(fold.exact, fold.as_claimed) for fold in FOLDS} == {(True, True), (False, True), (True, False)}
    assert {"demo", "llama", "qwen2", "qwen3", "gpt_neox", "gpt2"} <= {fold.source for fold in FOLDS}
    for words in ("--to gqa", "--to mqa", "--container stock", "--container remote", "--rope intact"):
        assert any(words in fold.options for fold in FOLDS)
