"""Every command that the README shows runs as written, but shorter.

Every recipe that is shipped is one that distill takes.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfold.cli import main
from kvfold.distill.recipe.recipe_file import read_recipe

ROOT = Path(__file__).parent.parent
SHORTER = {
    "convert": ["--sequences", "2"],
    "distill": ["--set", "stages.0.tokens=4k", "--set", "data.seq_len=64"],
    "eval": ["--max-windows", "2"],
}


PAGES = ("README.md", "docs/convert.md", "docs/distill.md", "docs/evaluate.md", "docs/serve.md")


def blocks(kind: str) -> list[str]:
    """Return the code blocks of one kind in the README and then the documentation, in order."""
    pattern = rf"```{kind}\n(.*?)```"
    return [block for page in PAGES for block in re.findall(pattern, (ROOT / page).read_text("utf-8"), re.S)]


def commands() -> list[list[str]]:
    """Return the distinct kvfold commands in console blocks, in order."""
    lines = [
        line for block in blocks("console") for line in block.splitlines() if line.startswith("$ kvfold ")
    ]
    return [shlex.split(line, comments=True)[2:] for line in dict.fromkeys(lines)]


def test_readme_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    assert len(commands()) >= 5
    for words in commands():
        result = CliRunner().invoke(main, [*words, *SHORTER.get(words[0], [])])
        assert result.exit_code == 0, (words, result.output)
    assert {path.name for path in Path("out").iterdir()} == {"demo-gqa", "demo-mla", "demo-mla-distilled"}


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example runs as written, but shorter: fewer sequences, no refinement, fewer windows."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    (block,) = blocks("python")
    shorter = block.replace("length=256", "length=32, sequences=2, refine=0").replace(
        "max_windows=64", "max_windows=1"
    )
    assert shorter.count("sequences=2") == 1
    assert shorter.count("max_windows=1") == 1
    names: dict[str, Any] = {}
    exec(compile(shorter, "README.md", "exec"), names)
    assert names["folded"].directory.is_dir()
    assert names["report"]["kl.mean"] > 0


def test_no_placeholder_is_left() -> None:
    for page in (*PAGES, "docs/results.md", "benchmarks/README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "@@" not in text, page
        assert "RESULTS_TABLE" not in text, page


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, "docs/results.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_readme_fits_on_a_few_screens() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 150


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"make ([\w-]+)`", (ROOT / page).read_text(encoding="utf-8")):
            assert f"\n{target}:" in makefile, target


def test_folders_of_the_layout_are_there() -> None:
    """Every folder in the table of CONTRIBUTING exists, and every package of convert is named."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w/]+)/`", text, re.M))
    assert all((ROOT / name).is_dir() for name in named)
    packages = {f"convert/{path.parent.name}" for path in (ROOT / "convert").glob("*/__init__.py")}
    assert packages <= named


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_shipped_recipes_are_valid(recipe: Path) -> None:
    read = read_recipe(recipe, ())
    assert read.stages
    result = CliRunner().invoke(main, ["distill", str(recipe), "--dry-run"])
    assert result.exit_code == 0, result.output


def test_demo_checkpoint_is_small_and_as_described() -> None:
    from kvfold.checkpoints.directory import Checkpoint

    demo = ROOT / "recipes" / "demo"
    assert sum(path.stat().st_size for path in demo.iterdir() if path.is_file()) < 6_000_000
    checkpoint = Checkpoint(demo)
    assert 1e6 < sum(checkpoint[name].numel() for name in checkpoint) < 2e6
    assert checkpoint.config["num_key_value_heads"] == checkpoint.config["num_attention_heads"] == 8
