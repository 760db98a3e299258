"""Code that an earlier kvfold wrote into an output: renewed, and not handed on."""

import hashlib
import os
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvfold
from kvfold.cli import main
from kvfold.models.remote_code import EARLIER, FILES, HERE, ship

from ..support.commands import run_main
from ..support.folds import fold_latent
from ..support.tiny import make

ATTENTION = "attention_kvfold.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with code, and one without."""
    place = tmp_path_factory.mktemp("made")
    make(place / "source")
    for name in ("remote", "stock"):
        fold_latent(place / "source", "--kv-budget", "50%", "--container", name).rename(place / name)
    return place


@pytest.fixture
def earlier(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output whose attention is code of an earlier kvfold, by its digest."""
    directory = Path(shutil.copytree(made / "remote", tmp_path / "earlier"))
    file = directory / "attention_kvfold.py"
    file.write_text(file.read_text() + "\n# as it was\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(EARLIER, file.name, (digest,))
    file.chmod(0o664)
    return directory


def test_code_of_an_earlier_version_is_renewed(earlier: Path, made: Path) -> None:
    invoke = CliRunner().invoke
    before = os.umask(0o077)
    renewed = invoke(main, ["verify", str(earlier), "--lint", "--renew-code"])
    os.umask(before)
    assert (earlier / ATTENTION).stat().st_mode & 0o777 == 0o664
    assert renewed.exit_code == 0, renewed.output
    assert f"renewed attention_kvfold.py in {earlier}" in renewed.output.replace("\n", "")
    for name in os.listdir(made / "remote"):
        assert (earlier / name).read_bytes() == (made / "remote" / name).read_bytes(), name
    again = invoke(main, ["verify", str(earlier), "--lint", "--renew-code"])
    assert again.exit_code == 0
    assert "is this version's" in again.output


def test_code_not_of_kvfold_or_in_a_link_is_not_renewed(earlier: Path, made: Path, tmp_path: Path) -> None:
    def refused(directory: Path) -> str:
        done = run_main("verify", directory, "--renew-code", code=2)
        return " ".join(done.output.split())

    file = earlier / "attention_kvfold.py"
    elsewhere = tmp_path / "blob"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert "is a link, as in a cache of downloads; renew the code of a copy" in refused(earlier)
    assert (file.is_symlink(), elsewhere.read_bytes()) == (True, before)
    (earlier / "layers_kvfold.py").write_text("print('mine')\n")
    assert "layers_kvfold.py is not that of any kvfold, so nothing was replaced" in refused(earlier)
    assert (earlier / "layers_kvfold.py").read_text() == "print('mine')\n"
    (earlier / "layers_kvfold.py").unlink()
    assert "layers_kvfold.py is missing, so nothing was replaced" in refused(earlier)
    assert "brings no code of kvfold's" in refused(made / "stock")
    (earlier / "config.json").write_text('{"model_type": ')
    assert "config.json" in refused(earlier)


def test_a_wrong_option_is_told_before_code_is_renewed(earlier: Path, tmp_path: Path) -> None:
    before = (earlier / ATTENTION).read_bytes()
    done = run_main("verify", earlier, "--renew-code", "--llama-cpp", tmp_path, code=2)
    assert "is for --engine llama.cpp" in done.output
    assert (earlier / ATTENTION).read_bytes() == before


def test_what_is_made_of_an_earlier_output_gets_this_versions_code(earlier: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ship(earlier, tmp_path / "out")
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (HERE / name).read_bytes()


def test_from_python(earlier: Path, made: Path, tmp_path: Path) -> None:
    before = (earlier / ATTENTION).read_bytes()
    with pytest.raises(kvfold.InvalidInput, match=r"is for engines llama\.cpp"):
        kvfold.verify(earlier, run=False, llama_cpp=tmp_path, renew_code=True)
    assert (earlier / ATTENTION).read_bytes() == before
    assert kvfold.verify(earlier, run=False, renew_code=True).failures == []
    assert (earlier / ATTENTION).read_bytes() == (made / "remote" / ATTENTION).read_bytes()
    with pytest.raises(kvfold.InvalidInput, match="brings no code of kvfold's"):
        kvfold.verify(made / "stock", run=False, renew_code=True)


def test_the_configuration_describes_every_field_that_the_code_reads() -> None:
    read = {
        name
        for file in HERE.glob("*_kvfold.py")
        for name in re.findall(r"kvfold(?:\[|\.get\()\"(\w+)\"", file.read_text())
    }
    assert {"form", "latent_norm"} <= read
    text = (HERE / "configuration_kvfold.py").read_text().split('"""')[1]
    assert {name for name in read if f"kvfold.{name} " not in text} == set()
