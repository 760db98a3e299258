"""The benchmark that two revisions fold alike finds every difference, and runs each revision's own code."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from benchmarks import revisions, same_bytes
from benchmarks.differences import compare
from benchmarks.same_bytes import Row

RECORD: dict[str, Any] = {
    "kvfold": "0.1.0", "command": "kvfold convert /one/source --to mla --rank 8",
    "source": {"path": "/one/source"}, "notices": ["a sentence"], "layers": [{"measured": 0.5}],
}  # fmt: skip
# A package in place of kvfold: `python -m kvfold NUMBER` writes one weight file, and fails at 0.
PACKAGE = """\
import sys
from pathlib import Path
from .{module} import grow
number = int(sys.argv[1])
assert number, "no such number"
Path("model.safetensors").write_text(str(grow(number)))
"""


def write(folder: Path, **changes: Any) -> Path:
    """Write what a fold may write; `changes` are keys of kvfold.json, or texts of files by their stems."""
    texts = {
        "model.safetensors": "weights", "config.json": "{}", "layers_kvfold.py": "code",
        "README.md": "card",
    }  # fmt: skip
    texts |= {name: changes.pop(Path(name).stem) for name in texts if Path(name).stem in changes}
    folder.mkdir()
    for name, text in {**texts, "kvfold.json": json.dumps({**RECORD, **changes})}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("changes", "found"), [
    ({"model": "other"}, "model.safetensors: "),
    ({"config": '{"a": 1}'}, "config.json: "),
    ({"layers": [{"measured": 0.25}]}, "kvfold.json: layers[0].measured is 0.5 before, 0.25 after"),
    ({"layers": []}, "kvfold.json: layers[0].measured is 0.5 before, missing after"),
    ({"command": "kvfold convert /one/source --to mla --rank 9"}, "kvfold.json: command is "),
])  # fmt: skip
def test_differences_are_found(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    result = compare(write(tmp_path / "one"), write(tmp_path / "other", **changes))
    assert any(text.startswith(found) for text in result.found), result.found
    assert list(result.weights) == ["model.safetensors"]


@pytest.mark.parametrize(("changes", "note"), [
    ({}, None),
    ({"kvfold": "0.2.0"}, None),
    ({"source": {"path": "/other/source"}}, None),
    ({"command": "kvfold convert /other/source --rank 8 --to mla"}, None),
    ({"layers_kvfold": "new code"}, "layers_kvfold.py: code changed"),
    ({"README": "new card"}, "README.md: card changed"),
    ({"notices": ["a better sentence"]}, "kvfold.json: notices[0] is "),
    ({"request": {"to": "mla"}}, "kvfold.json: request.to is missing before, 'mla' after"),
])  # fmt: skip
def test_allowed_changes_are_notes(changes: dict[str, Any], note: str | None, tmp_path: Path) -> None:
    result = compare(write(tmp_path / "one"), write(tmp_path / "other", **changes))
    assert result.found == []
    assert [text[: len(note or "")] for text in result.notes] == ([note] if note else [])


def test_saved_statistics_may_name_their_run(tmp_path: Path) -> None:
    """Their numbers and all else that they say must be the same."""
    tensors, about = {"0.x": torch.ones(2)}, {"schema": 3, "seed": 0}
    files = {
        "one": (tensors, about), "named": (tensors, {**about, "run": "abc"}),
        "seeded": (tensors, {**about, "seed": 1}), "changed": ({"0.x": torch.zeros(2)}, about),
    }  # fmt: skip
    for name, (values, said) in files.items():
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "s.safetensors", {"kvfold.statistics": json.dumps(said)})
    named = compare(tmp_path / "one", tmp_path / "named")
    assert (named.found, named.notes) == ([], ["s.safetensors: run of the statistics changed"])
    for name in ("seeded", "changed"):
        assert len(compare(tmp_path / "one", tmp_path / name).found) == 1, name


def test_missing_files_and_evaluations_are_differences(tmp_path: Path) -> None:
    """An evaluation may have no new keys, unlike kvfold.json."""
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    (one / "tokenizer.json").write_text("{}")
    (one / "eval.json").write_text('{"versions": {"kvfold": "1"}, "ppl": 2.0}')
    (other / "eval.json").write_text('{"versions": {"kvfold": "2"}, "ppl": 2.0, "kl": 0.1}')
    assert compare(one, other).found == [
        "eval.json: kl is missing before, 0.1 after",
        "tokenizer.json: only before",
    ]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two revisions that write the same, by modules of other names; and rows to run."""
    root = tmp_path / "repository"
    (root / "kvfold").mkdir(parents=True)
    (root / "kvfold" / "__init__.py").touch()
    monkeypatch.setattr(revisions, "ROOT", root)
    monkeypatch.setattr(same_bytes, "ROWS", (Row("one", ("1",)), Row("two", ("2",))))
    git(root, "init", "--quiet")
    for module in ("old", "new"):
        for path in (root / "kvfold").glob("[on]*.py"):
            path.unlink()
        (root / "kvfold" / f"{module}.py").write_text("def grow(number):\n    return number\n")
        (root / "kvfold" / "__main__.py").write_text(PACKAGE.format(module=module))
        git(root, "add", "--all")
        git(
            root, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "--message",
            module,
        )  # fmt: skip
    return root


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def run(*arguments: str) -> Result:
    return CliRunner().invoke(same_bytes.main, arguments)


def test_each_revision_runs_its_own_code(repository: Path, tmp_path: Path) -> None:
    """Each revision lacks the other one's module, while kvfold is installed here."""
    report = tmp_path / "report.json"
    result = run("--before", "HEAD~1", "--after", "HEAD", "--json", str(report))
    assert result.exit_code == 0, result.output
    assert "all 2 rows are equal" in result.output
    written = json.loads(report.read_text())
    assert written["after"]["commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert [row["result"] for row in written["rows"]] == ["equal", "equal"]
    assert all(row["weights"]["model.safetensors"] for row in written["rows"])


def test_a_change_of_the_working_tree_is_found(repository: Path) -> None:
    """Files that git does not know yet count, and neither index nor branches change."""
    (repository / "kvfold" / "fresh.py").write_text("def grow(number):\n    return min(number, 1)\n")
    (repository / "kvfold" / "__main__.py").write_text(PACKAGE.format(module="fresh"))
    before = git(repository, "status", "--porcelain")
    result = run("--before", "HEAD")
    assert result.exit_code == same_bytes.UNMET
    assert "1 of 2 rows are not equal: two (different)" in result.output
    assert git(repository, "status", "--porcelain") == before
    assert run("--before", "HEAD", "--only", "one").exit_code == 0


def test_a_row_that_fails_with_both_is_no_success(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_bytes, "ROWS", (Row("none", ("0",)),))
    result = run("--before", "HEAD~1", "--after", "HEAD")
    assert result.exit_code == same_bytes.UNMET
    assert "none (error)" in result.output
    assert "before: kvfold 0 exits with 1: AssertionError: no such number" in result.output
    assert "after: kvfold 0 exits with 1" in result.output


def test_mistakes(repository: Path) -> None:
    for arguments, said in (
        (("--before", "nowhere"), "nowhere"),
        (("--before", "HEAD", "--only", "three"), "three is no row; choose from one, two"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert said in result.output


def test_a_fold_of_this_revision() -> None:
    """The environment runs kvfold itself, on a source that the benchmark makes."""
    result = run("--before", "HEAD", "--after", "HEAD", "--only", "gqa-mean")
    assert result.exit_code == 0, result.output
