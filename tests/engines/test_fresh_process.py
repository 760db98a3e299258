"""vLLM's answers held against transformers': what passes, is told, or fails (`make test-vllm` runs it)."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.engines import fresh_process
from kvfold.engines.fresh_process import NEAR, Check, NotRun, Packed, compare_served, run_apart, serve
from kvfold.engines.probes import probe_vllm
from kvfold.engines.probes.probe import load

from ..support.quantised import FORMATS, quantise
from ..support.tiny import make

OWN = {
    "log_probs": [[-1.0, -2.0], [-3.0, -4.0]],
    "tokens": [[5, 6], [7, 8]],
    "leads": [[1.0, 1.0], [1.0, 0.5 * NEAR]],
}
SEEN = {
    "version": "1", "dtype": "float32", "log_probs": OWN["log_probs"], "tokens": OWN["tokens"],
    "cache": [40.0, 40.0],
}  # fmt: skip


def checks(claimed: int | None = 40, **changes: Any) -> dict[str, bool | None]:
    found, _ = compare_served(SEEN | changes, {"own": OWN}, claimed)
    return {check.name: check.passed for check in found}


def test_the_same_answers_pass() -> None:
    assert checks() == {"vllm": True, "vllm greedy": True, "vllm cache": True}


@pytest.mark.parametrize(("changes", "spoiled"), [
    ({"log_probs": [[-1.0, -2.0], [-3.0, -4.0 + 0.5 * NEAR]]}, {}),
    ({"log_probs": [[-1.0, -2.0], [-3.0, -4.0 + 2 * NEAR]]}, {"vllm": False}),
    ({"log_probs": [[-1.0, float("nan")], [-3.0, -4.0]]}, {"vllm": False}),
    ({"tokens": [[5, 6], [7, 9]]}, {}),  # the best token led by less than rounding
    ({"tokens": [[5, 9], [7, 8]]}, {"vllm greedy": False}),
    ({"tokens": [[9, 6], [7, 8]]}, {"vllm greedy": False}),
    ({"cache": [40.0, 80.0]}, {"vllm cache": None}),
    ({"claimed": 20}, {"vllm cache": None}),
    ({"claimed": None}, {"vllm cache": None}),
    ({"dtype": "bfloat16", "tokens": [[9, 9], [9, 9]]}, {"vllm greedy": None}),
    ({"dtype": "bfloat16", "log_probs": [[-1.1, -2.0], [-3.0, -4.0]]}, {"vllm greedy": None}),
    ({"dtype": "bfloat16", "log_probs": [[-1.1, -2.1], [-3.1, -4.0]]}, {"vllm greedy": None, "vllm": False}),
])  # fmt: skip
def test_what_differs(changes: dict[str, Any], spoiled: dict[str, bool | None]) -> None:
    """Beyond rounding it fails; a larger cache, and tokens in 16 bits, are told."""
    assert checks(**changes) == {"vllm": True, "vllm greedy": True, "vllm cache": True} | spoiled


def test_numbers_of_both_comparisons() -> None:
    source = OWN | {"log_probs": [[-1.0, -2.0], [-3.0, -4.5]], "tokens": [[5, 6], [1, 2]]}
    _, numbers = compare_served(SEEN, {"own": OWN, "source": source}, 40)
    assert numbers["own"] == {"max_difference": 0, "mean_difference": 0, "same_tokens": 4, "tokens": 4}
    assert numbers["source"] == {
        "max_difference": 0.5, "mean_difference": 0.125, "same_tokens": 2, "tokens": 4,
    }  # fmt: skip
    assert numbers["cache"] == 40


def test_no_answer() -> None:
    """A run that fails, fails; one that lacks a kernel or a package says nothing of the checkpoint."""
    (failed,), _ = compare_served({"failed": "the run ended with KeyError"}, {}, 40)
    (lacking,), _ = compare_served({"version": "1", "lacking": "attention 16 wide"}, {}, 40)
    assert (failed.passed, lacking.passed) == (False, None)
    assert "attention 16 wide" in lacking.detail


def test_a_multimodal_class_is_asked_for_text_alone() -> None:
    """Which needs no processor of images."""
    asked = {"directory": "d", "dtype": "float32", "text": [[1]]} | dict.fromkeys(
        ("trust", "latent", "plugin"), False
    )
    for multimodal in (False, True):
        given = probe_vllm._settings(
            {**asked, "prompt": 1, "steps": 1, "multimodal": multimodal}, cuda=not multimodal
        )
        assert given.get("language_model_only", False) == multimodal


def test_a_package_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert "import torchvision, which does not load here" in probe_vllm._unloaded()


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    """By the last line that it said."""
    asked = {
        "source": None, "sequences": 1, "length": 8, "seed": 0, "answers": False, "trust": False,
        "dtype": "float32",
    }  # fmt: skip
    failed = run_apart("probe.py", {**asked, "directory": str(tmp_path)})
    assert "the run ended with" in failed["failed"]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every run in a fresh process be one of a shell script."""
    file = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(file))

    def stand_in(script: str) -> None:
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    return stand_in


def test_a_run_that_hangs_is_stopped(python: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails its check."""
    python("exec sleep 60")
    monkeypatch.setattr(fresh_process, "HOURS", 1e-5)
    told = "the run was stopped, since it had not ended after 1e-05 hours"
    assert run_apart("probe.py", {}) == {"failed": told}
    assert compare_served({"failed": told}, {}, None) == ([Check("vllm", False, told)], {})


END = "; end other programs that take memory, or use --lint to apply the rules alone"
KILLED = 'echo "Received sigquit from a child" >&2; kill -KILL $$'  # as SGLang does, whose scheduler failed


@pytest.mark.parametrize(("script", "reason"), [
    ("echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0' >&2; exit 1",
     "the GPU has too little memory (2.00 GiB more were needed) to run the checkpoint"),
    ("echo 'MemoryError' >&2; exit 1", "this machine has too little memory to run the checkpoint"),
    ("kill -KILL $$", "the run was killed, usually by the system for lack of memory"),
    (f"echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.' >&2; {KILLED}",
     "the GPU has too little memory (2.00 GiB more were needed) to run the checkpoint"),
])  # fmt: skip
def test_a_full_memory_is_no_failed_check(script: str, reason: str, python: Callable[[str], None]) -> None:
    python(script)
    with pytest.raises(NotRun) as mistake:
        run_apart("probe.py", {})
    assert str(mistake.value) == reason + END


def test_a_run_that_kills_itself_ends_with_what_another_process_raised(python: Callable[[str], None]) -> None:
    last = "AttributeError: 'Gemma2Config' object has no attribute 'hidden_act'"
    python(f'echo "{last}" >&2; {KILLED}')
    assert run_apart("probe.py", {}) == {"failed": f"the run ended with {last}"}


def test_a_bound_on_scores_is_computed_in_the_reference(tmp_path: Path) -> None:
    """Up to transformers 5.19 the attention that Gemma 2 gets by default leaves it out, without an error."""
    source = make(tmp_path / "source", "gemma2")
    ids = torch.arange(2, 40)[None]
    eager = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    unbounded = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", attn_logit_softcapping=None
    )
    model, missing = load(str(source), "float32", False)
    with torch.no_grad():
        found, wanted, without = (one(ids).logits for one in (model, eager, unbounded))
    assert missing == []
    assert model.config._attn_implementation == "eager"
    assert torch.equal(found, wanted)
    assert (without - wanted).abs().max() > 1e-3 * wanted.std()  # otherwise nothing is tested here


def test_a_source_that_is_not_quantised_has_no_quantised_weights_to_run(tmp_path: Path) -> None:
    """It says nothing of an engine's kernels."""
    plain = make(tmp_path / "plain")
    packed = quantise(plain, tmp_path / "packed", FORMATS["compressed int8"])
    assert Packed.of(plain, packed) is None
    assert Packed.of(packed, plain) == Packed(packed, None)
    assert Packed.of(packed, packed) == Packed(packed, packed.resolve())


@pytest.mark.parametrize(("running", "wanted"), [
    (("quantised", "source", "copy"), {"vllm": True, "vllm greedy": True, "vllm cache": True}),
    (("source", "copy"), {"vllm": False}),
    (("copy",), {"vllm quantised": None, "vllm": True, "vllm greedy": True, "vllm cache": True}),
    ((), {"vllm quantised": None, "vllm": False}),
])  # fmt: skip
def test_quantised_weights_that_vllm_runs_of_the_source_alone_fail(
    running: tuple[str, ...], wanted: dict[str, bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that it runs of neither are named, and the dequantised copy is run instead."""
    given = []

    def probe(script: str, asked: dict[str, Any]) -> dict[str, Any]:
        given.append((asked["directory"], asked["dtype"]))
        return dict(SEEN) if asked["directory"] in running else {"failed": "no kernel"}

    monkeypatch.setattr("kvfold.engines.fresh_process.run_apart", probe)
    asked = {"directory": "copy", "dtype": "float32", "trust": False, "latent": False}
    answers = {"own": OWN, "text": [[1]], "prompt": 1, "steps": 1}
    found, _ = serve("vllm", asked, answers, 40, Packed(Path("quantised"), Path("source")))
    assert {check.name: check.passed for check in found} == wanted
    assert given == [("quantised", "auto"), ("source", "auto"), ("copy", "float32")][: len(given)]
