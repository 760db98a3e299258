"""A source that is not any more what a checkpoint was made of is told, since every number is relative to
it.
"""

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvfold.convert.cli import main as convert
from kvfold.eval.cli import main as evaluate
from kvfold.texts.corpus import read_text
from kvfold.verification.cli import main as verify

from .conftest import Make


@pytest.mark.usefixtures("warm_probe")
def test_a_source_that_has_changed_is_told(make: Make, tmp_path: Path) -> None:
    source, out, text = make(seed=11), tmp_path / "out", tmp_path / "text.txt"
    text.write_bytes(b"one line\r\nand another\r\n" * 20)
    command = [str(source), "--to", "mqa", "--calibration", "none", "--verify", "none", "--out", str(out)]
    assert CliRunner().invoke(convert, command).exit_code == 0
    measure = [str(out), "--text", str(text), "--window", "32", "--suite", "ppl"]
    assert "has changed" not in CliRunner().invoke(evaluate, measure).output
    assert "is not what" not in CliRunner().invoke(verify, [str(out)]).output
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.3
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    done = CliRunner().invoke(evaluate, measure)
    assert done.exit_code == 0, done.output
    assert f"{source} has changed since {out} was made from it: model.safetensors differs" in done.output
    done = CliRunner().invoke(verify, [str(out)])
    assert (
        f"{source} is not what {out} was made of: kvfold.json records another model.safetensors"
        in done.output
    )


def test_line_ends_are_scored_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "crlf.txt"
    path.write_bytes(b"one\r\ntwo\n")
    assert read_text(str(path)).joined == "one\r\ntwo\n"
