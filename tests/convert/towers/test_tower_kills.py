"""Folds of multimodal checkpoints that are stopped (at every operation: tests/test_stopped_commands.py)."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvfold.cli import main
from kvfold.core.errors import InvalidInput

from ...support.commands import run_main
from ...support.quantised import quantise, quantised_tower
from ...support.stops import bits
from ...support.towers import make_multimodal


def change_text(source: Path) -> None:
    """Change a weight of the text tower."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    name = next(
        name for name in tensors if name.endswith("language_model.model.layers.0.self_attn.o_proj.weight")
    )
    save_file({**tensors, name: tensors[name] + 1}, file, metadata={"format": "pt"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_multimodal(tmp_path / "llava", "llava")


def words(source: Path, out: Path, heads: int = 2) -> list[str]:
    options = ("--to", "gqa", "--kv-heads", str(heads), "--calibration", "none", "--verify", "none")
    return ["convert", str(source), *options, "--out", str(out)]


def stopped(given: list[str], end: BaseException) -> None:
    """Run a fold that ends when its folded tower is finished."""

    def stop(*_: object) -> None:
        raise end

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvfold.convert.towers.whole_checkpoint.put_back", stop)
        assert CliRunner().invoke(main, given).exit_code != 0


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("end", [KeyboardInterrupt(), InvalidInput("no space left")])
def test_a_finished_fold_outlives_a_stop_while_it_is_put_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, is_quantised: bool
) -> None:
    """Folding is what takes long: the same command then folds nothing again."""
    if is_quantised:
        source = quantise(source, tmp_path / "fp8", quantised_tower("fp8 blocks"))
    place, clean = tmp_path / "stopped" / "out", tmp_path / "clean" / "out"
    for out in (place, clean):
        out.parent.mkdir()
    assert CliRunner().invoke(main, words(source, clean)).exit_code == 0
    stopped(words(source, place), end)
    monkeypatch.setattr("kvfold.fold_run._fold", None)
    run_main(*words(source, place))
    assert bits(place.parent) == bits(clean.parent)


def test_a_finished_part_of_another_command_is_kept(source: Path, tmp_path: Path) -> None:
    stopped(words(source, tmp_path / "out"), KeyboardInterrupt())
    before = bits(tmp_path)
    refused = run_main(*words(source, tmp_path / "out", heads=1), code=2)
    assert "another command, which differs in --kv-heads (was 2); give that command again" in refused.stderr
    assert bits(tmp_path) == before


@pytest.mark.parametrize("name", ["source", "tower", "text"])
def test_what_has_changed_since_the_stop_is_made_again(name: str, source: Path, tmp_path: Path) -> None:
    place, clean = tmp_path / "stopped" / "out", tmp_path / "clean" / "out"
    stopped(words(source, place), KeyboardInterrupt())
    if name == "source":
        change_text(source)
    else:
        file = place.with_name("out.partial") / name / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    for out in (place, clean):
        run_main(*words(source, out))
    assert bits(place.parent) == bits(clean.parent)


def test_a_tower_that_stays_is_not_taken_for_that_of_a_changed_source(source: Path, tmp_path: Path) -> None:
    given = [*words(source, tmp_path / "out"), "--text-only"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvfold.fold_run._fold", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        CliRunner().invoke(main, given)
    change_text(source)
    assert f"{tmp_path / 'out.tower'} exists and nothing is overwritten" in run_main(*given, code=2).stderr


@pytest.mark.parametrize("name", ["out.tower", "out.text", "out.partial"])
def test_a_directory_of_the_user_is_never_touched(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("mine")
    code = CliRunner().invoke(main, words(source, tmp_path / "out")).exit_code
    assert (tmp_path / name / "config.json").read_text() == "mine"
    assert code == (2 if name == "out.partial" else 0)
