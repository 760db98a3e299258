"""The demonstration: a mistake in an option is found before anything is written, and a stopped run resumes."""

import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfold import demo
from kvfold.cli import main
from kvfold.core.signals import Interrupted
from kvfold.distill.run import job

from .support.commands import run_main


@pytest.mark.parametrize(
    ("tokens", "words"),
    [("many", "a number of tokens, such as"), ("0", "at least 1"), ("1.5", "whole number"), ("nan", "whole")],
)
def test_a_wrong_length(tokens: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without --out, so that the right command is not refused by it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for place in (["--out", str(tmp_path / "made")], []):
        refused = run_main("demo", "--tokens", tokens, *place, code=2)
        assert f"--tokens is '{tokens}'; it should be a" in refused.stderr
        assert words in refused.stderr
    assert list(tmp_path.iterdir()) == []


def shown(out: Path, tokens: str = "8k") -> tuple[int, str]:
    done = CliRunner().invoke(main, ["demo", "--out", str(out), "--tokens", tokens])
    return done.exit_code, done.output


@pytest.mark.parametrize("placed", [False, True])
def test_a_signal_ends_it_in_words(placed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise Interrupted(signal.SIGTERM, "stopped after step 3 of 86 of stage kl")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "_run", stopped)
    done = run_main("demo", *(["--out", str(tmp_path / "made")] if placed else []), code=128 + signal.SIGTERM)
    advice = "run the same command again to resume" if placed else "give --out, and the same command resumes"
    assert done.stderr == f"Interrupted: stopped after step 3 of 86 of stage kl; {advice}.\n"


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold on disk is kept as it is, and another length is not mixed with it."""
    monkeypatch.setattr(demo, "CALIBRATION", {**demo.CALIBRATION, "sequences": 2, "length": 16})
    monkeypatch.setattr(demo, "REFINE", 0)
    monkeypatch.setattr(demo, "TARGETS", {"mla": demo.TARGETS["mla"]})
    out, asked = tmp_path / "out", []

    def stop(recipe: Any) -> None:
        asked.append(recipe.output)
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "distill", stop)
    assert shown(out)[0] != 0
    weights = out / "demo-mla" / "model.safetensors"
    before = weights.stat()
    code, told = shown(out, "9k")
    assert code == 2
    assert "of another command, which differs in --tokens (was 8k); give that command again" in told
    assert shown(out)[0] != 0
    assert len(asked) == 2
    after = weights.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with demo._claimed(out, "8k"):
        pass
    assert [path.name for path in out.iterdir()] == ["demo-mla"]
    code, told = shown(out)
    assert code == 2
    assert "exists and nothing is overwritten" in told


def test_a_directory_of_somebody_else_is_not_taken_up(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    for name in ("theirs", "link"):
        code, told = shown(tmp_path / name)
        assert code == 2
        assert "exists and nothing is overwritten" in told
    assert list((tmp_path / "theirs").iterdir()) == []
