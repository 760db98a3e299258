"""The demonstration's options: a mistake in one is found before anything is written."""

import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfold.cli import main


@pytest.mark.parametrize(
    ("tokens", "words"),
    [("many", "a number of tokens, such as"), ("0", "at least 1"), ("1.5", "whole number"), ("nan", "whole")],
)
def test_a_wrong_length_leaves_no_directory(
    tokens: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without --out, so that the right command is not refused by it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for place in (["--out", str(tmp_path / "made")], []):
        refused = CliRunner().invoke(main, ["demo", "--tokens", tokens, *place])
        assert refused.exit_code == 2
        assert f"--tokens is '{tokens}'; it should be a" in refused.stderr
        assert words in refused.stderr
    assert list(tmp_path.iterdir()) == []
