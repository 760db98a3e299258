"""What README and docs show runs as written on less text; blocks for a GPU or the Hub are only parsed."""

import re
import shutil
from pathlib import Path
from typing import Any

import click
import pytest

import kvfold
from kvfold.cli import main
from kvfold.convert.request import read_config
from kvfold.distill.recipe.recipe_file import as_recipe

from ..support.commands import run_main
from ..support.shown_code import PAGES, ROOT, Block, all_blocks, check_words, kvfold_words

SHORTER = {
    "convert": ["--sequences", "2", "--length", "32", "--refine", "0"],
    "distill": ["--set", "stages.0.tokens=1k", "--set", "stages.0.batch_tokens=1k", "--set",
                "evaluate.windows=2"],
    "eval": ["--max-windows", "1"],
    "migrate": ["--tokens-per-step", "4k", "--sequences", "2", "--length", "32", "--refine", "0"],
}  # fmt: skip
BLOCKS = all_blocks()
COMMANDS = [(block, *command) for block in BLOCKS if block.kind == "console" for command in block.commands()]


def compare(shown: list[str], output: str, place: str) -> None:
    """Check that shown lines come out in this order; `...` stands for others, spaces do not count."""
    lines = iter(" ".join(re.sub("[│┃]", " ", line).split()) for line in output.splitlines())
    for line in shown:
        if line.strip() != "...":
            assert any(" ".join(line.split()) == found for found in lines), f"{place}: {line}\n\n{output}"


def run(block: Block, command: str, shown: list[str], is_verified: bool) -> None:
    words = kvfold_words(command)
    extra = [] if block.compared or "--dry-run" in words else SHORTER.get(words[0], [])
    if words[:2] in (["distill", "explain"], ["distill", "validate"]):
        extra = []
    if words[0] == "verify" and is_verified:
        extra = ["--lint"]  # starting engines takes long, and a page more shows nothing new
    result = run_main(*words, *extra)
    if block.compared:
        compare(shown, result.output, f"{block.page}: {command}")


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    done: set[str] = set()
    for block, command, shown in COMMANDS:
        if block.reason is None and command not in done and kvfold_words(command):
            run(block, command, shown, any(other.startswith("kvfold verify") for other in done))
            done.add(command)
    assert len(done) >= 7


def test_commands_that_do_not_run_are_right() -> None:
    """Options of kvfold exist, and so do make's targets, benchmarks and files of recipes."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for block, command, _ in COMMANDS:
        place = f"{block.page}: {command}"
        words = kvfold_words(command)
        assert words or block.reason or command.startswith(("make ", "git ", "cd ")), f"{place}: never run"
        if words:
            try:
                check_words(words)
            except click.ClickException as mistake:
                raise AssertionError(f"{place}: {mistake.format_message()}") from None
        for module in re.findall(r"-m (benchmarks\.\w+)", command):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), place
        for target in re.findall(r"^make ([\w-]+)", command):
            assert f"\n{target}:" in makefile, place
        for file in re.findall(r"recipes/[\w./-]+", command):
            assert (ROOT / file).exists(), place


def test_options_in_sentences_exist() -> None:
    """`kvfold X --option` in a sentence names a command and options that exist."""
    for page in PAGES:
        for found in re.findall(r"(?<!`)`kvfold ([^`\n]+)`(?!`)", (ROOT / page).read_text(encoding="utf-8")):
            words = found.split()
            command = main.get_command(click.Context(main), words[0])
            if command is not None:
                known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
                given = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
                assert given <= known | {"--help", "--processes"}, f"{page}: {found}"
            else:
                assert not words[0].isalpha() or words[0].isupper(), f"{page}: kvfold {found}"


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page share their names; each runs as written, but on less text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    fold, evaluate = kvfold.fold, kvfold.evaluate

    def fold_less(*arguments: Any, **options: Any) -> Any:
        return fold(*arguments, **{**options, "sequences": 2, "length": 32, "refine": 0})

    def evaluate_less(*arguments: Any, **options: Any) -> Any:
        return evaluate(*arguments, **{**options, "max_windows": 1})

    monkeypatch.setattr(kvfold, "fold", fold_less, raising=False)
    monkeypatch.setattr(kvfold, "evaluate", evaluate_less, raising=False)
    names: dict[str, dict[str, Any]] = {page: {} for page in PAGES}
    for block in BLOCKS:
        if block.kind == "python" and block.reason is None:
            exec(compile(block.text, block.page, "exec"), names[block.page])
        elif block.kind == "python":
            compile(block.text, block.page, "exec")
    assert names["README.md"]["folded"].directory.is_dir()
    assert names["README.md"]["report"]["kl.mean"] > 0


def test_recipes_and_requests_in_pages_are_valid(tmp_path: Path) -> None:
    requests = []
    for number, block in enumerate(block for block in BLOCKS if block.kind == "yaml"):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.text, encoding="utf-8")
        if block.text.startswith("schema: 1"):
            assert as_recipe(file).stages
        if block.text.startswith("model: "):
            requests.append(read_config(file, {}))
    assert [request.engines for request in requests] == [("mlx",)]


def test_links_lead_somewhere() -> None:
    from docs.make.site import GENERATED

    for page in (*PAGES, "CONTRIBUTING.md", "benchmarks/README.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
            made = page.startswith("docs/") and link in GENERATED
            assert made or (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_readme_fits_on_a_screen_and_a_half() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 120


def test_every_page_is_in_the_navigation() -> None:
    from docs.make.site import GENERATED

    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    listed = re.findall(r": (\S+\.md)$", navigation, re.M)
    assert sorted(listed) == sorted({*GENERATED, *(page.removeprefix("docs/") for page in PAGES[1:])})


def test_folders_and_files_of_the_layout_are_there() -> None:
    """All that CONTRIBUTING and extending.md name, and every package of convert is named."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w/]+)/`", text, re.M))
    assert all((ROOT / name).is_dir() for name in named)
    packages = {f"convert/{path.parent.name}" for path in (ROOT / "convert").glob("*/__init__.py")}
    assert packages <= named
    for page in ("CONTRIBUTING.md", "docs/extending.md"):
        for file in re.findall(r"`([a-z]+/[\w/]+\.py)`", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / file).is_file(), f"{page}: {file}"


def test_files_that_the_code_names_are_there() -> None:
    """In comments and docstrings, where no folder is named; `rules/` names files of engines."""
    folders = ("convert", "distill", "eval", "kvfold")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    known = {path.name for path in paths} | {"convert_hf_to_gguf.py", "generate.py"}
    for path in paths:
        if "rules" not in path.parts:
            named = re.findall(r"(?<![\w/])[a-z]\w*\.py\b", path.read_text(encoding="utf-8"))
            assert {*named} <= known, path


@pytest.mark.parametrize(
    "recipe",
    [*sorted((ROOT / "recipes").glob("*.yaml")), ROOT / "recipes/demo/distill.yaml"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_shipped_recipes_are_valid(recipe: Path) -> None:
    read = as_recipe(recipe)
    assert read.stages
    run_main("distill", "explain", recipe)


def test_demo_checkpoint_is_small_and_as_described() -> None:
    from kvfold.checkpoints.directory import Checkpoint

    demo = ROOT / "recipes" / "demo"
    assert sum(path.stat().st_size for path in demo.iterdir() if path.is_file()) < 6_000_000
    checkpoint = Checkpoint(demo)
    assert 1e6 < sum(checkpoint[name].numel() for name in checkpoint) < 2e6
    assert checkpoint.config["num_key_value_heads"] == checkpoint.config["num_attention_heads"] == 8
