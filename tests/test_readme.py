"""Every command that the README shows runs as written, but shorter.

Every recipe that is shipped is one that distill takes.
"""

import re
import shutil
from pathlib import Path

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


def commands() -> list[list[str]]:
    """The kvfold commands in the README's console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [
        line[2:].partition("  #")[0].split()
        for block in blocks
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    return [words[1:] for words in lines if words[0] == "kvfold"]


def test_readme_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    assert len(commands()) >= 5
    for file in ("README.md", "benchmarks/README.md"):
        assert "@@" not in (ROOT / file).read_text(encoding="utf-8"), f"a placeholder was left in {file}"
    for words in commands():
        result = CliRunner().invoke(main, [*words, *SHORTER.get(words[0], [])])
        assert result.exit_code == 0, (words, result.output)
    assert {path.name for path in Path("out").iterdir()} == {"demo-gqa", "demo-mla", "demo-mla-distilled"}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", (ROOT / "README.md").read_text()):
        assert f"\n{target}:" in makefile, target


@pytest.mark.parametrize("folder", ["convert", "distill", "eval"])
def test_the_tree_is_the_tree(folder: str) -> None:
    """Each file that the README's tree names below a folder is there, and each Python file there is named."""
    tree = (ROOT / "README.md").read_text().split("## The folder tree")[1]
    (below,) = re.findall(rf"^{folder}/(.*?)^\S", tree, re.MULTILINE | re.DOTALL)
    there = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert set(re.findall(r"\b(\w+\.py)\b", below)) == there


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
