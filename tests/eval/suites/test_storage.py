"""The loss of a number format of the cache, paired with the same student without it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicLayer

from kvfold.checkpoints.quality_blocks import RetrievalBlock, StorageBlock
from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.models.causal_lm import load
from kvfold.texts.corpus import Text

from ...support.commands import run_main
from ..conftest import Make

CPU = {"device": "cpu", "window": 32, "max_windows": 3}
INT4 = Options(**CPU, cache_dtype="int4")


@pytest.fixture(scope="session")
def latent(make: Make) -> Path:
    return make(latent=True, seed=2)


@pytest.mark.parametrize("latent_student", [False, True], ids=["mha", "mla"])
def test_the_block_is_the_difference_of_two_evaluations(
    mha: Path, other: Path, latent: Path, text: Text, latent_student: bool
) -> None:
    student = latent if latent_student else mha
    without = evaluate(student, other, text, Options(**CPU))
    found = evaluate(student, other, text, INT4)
    block = found.block("storage", StorageBlock)
    assert block.cache_dtype == found.cache_dtype == "int4"
    assert without.cache_dtype is None
    assert block.unquantised_nll == without.ppl.student.nll
    assert block.nll.mean == pytest.approx(found.ppl.student.nll.mean - without.ppl.student.nll.mean)
    assert block.kl_to_teacher.mean == pytest.approx(found.fidelity.kl.mean - without.fidelity.kl.mean)
    assert 1e-3 < block.kl.mean < block.kl_max
    assert 0 < block.same_top1.mean < 1
    assert found.ppl.teacher == without.ppl.teacher, "the teacher keeps its cache"


def test_bfloat16_costs_exactly_its_rounding(mha: Path, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluate(mha, None, text, Options(**CPU, cache_dtype="bfloat16"))
    loaded = load(mha, Options(**CPU))
    ids = torch.tensor(loaded.tokenizer(text.joined).input_ids[:31])[None]
    ids = torch.cat([torch.tensor([[loaded.tokenizer.bos_token_id]]), ids], 1)
    update = DynamicLayer.update

    def rounding(self: Any, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return update(self, keys.bfloat16().float(), values.bfloat16().float(), *rest, **named)

    monkeypatch.setattr(DynamicLayer, "update", rounding)
    with torch.no_grad():
        logits = loaded.model(input_ids=ids[:, :-1], use_cache=True).logits[0]
    nll = -logits.log_softmax(-1).gather(1, ids[0, 1:, None]).mean()
    assert found.ppl.student.window_nll[0] == pytest.approx(float(nll), abs=1e-6)
    block = found.block("storage", StorageBlock)
    assert block.kl_to_teacher is None
    assert 1e-8 < block.kl.mean < 1e-2


def test_models_one_at_a_time_give_the_same(mha: Path, other: Path, text: Text) -> None:
    apart = evaluate(mha, other, text, Options(**CPU, cache_dtype="int4", one_at_a_time=True))
    together = evaluate(mha, other, text, INT4)
    assert apart.suites["storage"].kl.mean == pytest.approx(together.suites["storage"].kl.mean, rel=1e-4)
    assert apart.ppl.student.perplexity == pytest.approx(together.ppl.student.perplexity, rel=1e-5)


def test_bytes_hold_the_scales(mha: Path, latent: Path) -> None:
    found = evaluate(latent, mha, None, Options(device="cpu", cache_dtype="int8"), suites=("cache",)).cache
    assert found.student.cache_dtype == "int8"
    assert found.student.quantised_bytes_per_token == 2 * (12 + 4 + 4)
    assert found.student.contexts[0].bytes == 4096 * 2 * (12 + 4 + 4)
    assert found.teacher.cache_dtype is None
    assert found.teacher.contexts[0].bytes == 4096 * 2 * 64 * 4


def test_needles_are_paired_too(make: Make) -> None:
    student = make(max_position_embeddings=400)
    settings = {"retrieval_lengths": "360", "retrieval_depths": 2, "retrieval_samples": 3}
    options = {"suites": ("retrieval",), "settings": SuiteSettings.read(settings)}
    without = evaluate(student, None, None, Options(device="cpu"), **options).suites["retrieval"]
    found = evaluate(student, None, None, Options(device="cpu", cache_dtype="int4"), **options)
    block = found.suites["retrieval"]
    assert isinstance(block, RetrievalBlock)
    assert block.unquantised == without.student
    assert block.student != without.student
    assert block.added is not None
    assert set(block.added) == set(block.student)
    assert without.added is None


def test_the_command(mha: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    words = ["eval", str(mha), "--text", "stdlib", "--window", "32", "--max-windows", "2", "--out", str(out)]
    done = run_main(
        *words, "--cache-dtype", "nvfp4", "--suite", "ppl", "--assert", "kl.added>0", "--device", "cpu"
    )
    assert "with the cache in nvfp4: KL added, nats" in done.output
    assert '"cache_dtype": "nvfp4"' in out.read_text()


@pytest.mark.parametrize(("options", "suites", "message"), [
    ({}, ("storage",), "add --cache-dtype NAME"),
    ({"cache_dtype": "int4"}, ("ppl", "speed"), "--suite speed times the cache"),
])  # fmt: skip
def test_suites_without_a_meaning_are_refused(
    mha: Path, text: Text, options: dict[str, Any], suites: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        evaluate(mha, None, text, Options(device="cpu", **options), suites=suites)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^cache_dtype is 'int3'; it should be 'bfloat16', "):
        Options.read({"cache_dtype": "int3"})


def test_a_loss_that_is_not_there_is_none(mha: Path, text: Text) -> None:
    zero = evaluate(mha, mha, text, Options(**CPU, cache_dtype="bfloat16", dtype="bfloat16"))
    assert math.isclose(zero.suites["storage"].kl.mean, 0, abs_tol=1e-9), "it is in bfloat16 already"
