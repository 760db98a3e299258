"""Who imports whom: convert nobody, eval convert, distill both. And no command's --help loads what it does not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"convert": set[str](), "eval": {"convert"}, "distill": {"convert", "eval"}}


def imported_folders(file: Path, folder: str) -> set[str]:
    """Sibling folders that a file imports from, by its relative imports."""
    depth = len(file.relative_to(ROOT / folder).parts)  # how many dots lead to the package that holds the folders
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.partition(".")[0] for name in names}
        assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvfold")), f"{file}: import relatively"
    return found & MAY_IMPORT.keys()


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_layers(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        assert imported_folders(file, folder) <= MAY_IMPORT[folder], file


@pytest.mark.parametrize(
    "command", ["", "convert", "distill", "eval", "verify", "publish", "demo", "families", "plan", "report", "migrate"]
)
def test_help_loads_nothing_heavy(command: str) -> None:
    arguments = [*command.split(), "--help"]
    code = (
        "import sys\n"
        "from kvfold.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'accelerate', 'pydantic', 'rich', 'huggingface_hub'}\n"
        "heavy |= {'matplotlib', 'jinja2'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout


def test_sizes() -> None:
    """Files of at most 300 lines, functions of at most 50."""
    for folder in (*MAY_IMPORT, "kvfold", "benchmarks", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            source = file.read_text()
            assert source.count("\n") <= 300, file
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert (node.end_lineno or 0) - node.lineno < 50, f"{file}: {node.name}"
