"""The layers of the packages: who may import whom, no cycles, and no heavy import behind `--help`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("convert", "distill", "eval")
# Folders and top files of the package from the lowest to the highest: each imports itself and what stands before it.
ORDER = (
    *("core", "arguments", "checkpoints", "models", "register", "texts", "recipes"),
    *("convert.algebra", "convert.families", "convert.calibration", "convert.methods", "convert.storage"),
    *("convert.formats", "engines.probes", "engines.rules", "convert.efforts", "convert.request"),
    *("convert.layer", "convert.decide", "convert.settle", "convert.write", "convert.towers"),
    *("convert", "engines", "eval"),
    *("distill.display", "distill.recipe", "distill.data", "distill.losses", "distill.parallel"),
    *("distill.stages", "distill.watch", "distill.run", "distill"),
    *("results", "quantisation", "publishing", "lab", "planning", "tower_run", "fold_run", "demo"),
    *("migration", "api", "cli", ""),
)
PROGRAMS = ("cli", "__main__")  # commands stand above everything and are imported by kvfold.cli alone


def module_name(file: Path) -> str:
    """Return the name that a file has as an installed module."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "kvfold" else ("kvfold", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> dict[str, Path]:
    """Return every module of the package by its name, each file once."""
    files = [file for folder in (*PARTS, "recipes") for file in (ROOT / folder).rglob("*.py")]
    for file in (ROOT / "kvfold").rglob("*.py"):
        if not any(parent.is_symlink() for parent in file.parents):
            files.append(file)
    return {module_name(file): file for file in sorted(files)}


FILES = source_files()


def imported(name: str) -> Iterator[str]:
    """Yield the modules that a module imports, under `TYPE_CHECKING` and inside functions too."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "kvfold")
        if not isinstance(node, ast.ImportFrom):
            continue
        assert not (node.module or "").startswith("kvfold"), f"{FILES[name]}: import relatively"
        if node.level:
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            target = f"{base}.{node.module}" if node.module else base
            for alias in node.names:
                whole = f"{target}.{alias.name}"
                yield whole if whole in FILES else target


def rank(name: str) -> int:
    """Return the place in ORDER of a module's nearest listed folder."""
    inside = name.removeprefix("kvfold").removeprefix(".")
    while inside not in ORDER:
        inside = inside.rpartition(".")[0]
    assert inside or name == "kvfold" or name.endswith("__main__"), f"{name} stands in no folder of ORDER"
    return ORDER.index(inside)


def test_folders_import_only_what_stands_below() -> None:
    """From tensors to what is written, and from there to the commands."""
    wrong = [
        f"{name} imports {target}"
        for name in FILES
        if name.rpartition(".")[2] not in PROGRAMS
        for target in imported(name)
        if target != "kvfold" and rank(target) > rank(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_a_detour() -> None:
    """Imports of every kind count: inside functions, under `TYPE_CHECKING`, and those of kvfold/__init__.py."""
    graph = {name: {target for target in imported(name) if target in FILES} for name in FILES}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, (*way, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_tests_share_helpers_in_support_alone() -> None:
    """A test module imports `tests/support`, and the conftest.py of its own folder or of one above it."""
    tests, wrong = ROOT / "tests", []
    for file in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (
                node.level or (node.module or "").startswith("tests")
            ):
                continue
            folder = [file.parent, *file.parents][node.level] if node.level else ROOT
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                target = folder.joinpath(*name.split("."))
                is_own = target.name == "conftest" and target.parent in file.parents
                if not is_own and tests / "support" not in (target, *target.parents):
                    wrong.append(f"{file.relative_to(ROOT)}: {target.relative_to(ROOT)}")
    assert not wrong, "\n".join(wrong)


def test_public_classes_have_names_of_their_own() -> None:
    homes: dict[str, list[str]] = {}
    for name, file in FILES.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    assert not shared


def test_files_have_names_of_their_own() -> None:
    """Only entry points share a name, since they are the same thing of two parts."""
    homes: dict[str, list[str]] = {}
    for name, file in FILES.items():
        if file.stem not in {"__init__", "__main__", "cli", "request"}:
            homes.setdefault(file.stem, []).append(name)
    assert not {name: places for name, places in homes.items() if len(places) > 1}


@pytest.mark.parametrize("command", [
    "", "convert", "distill", "eval", "verify", "publish", "demo", "families", "engines", "plan", "report",
    "migrate", "quantize",
])  # fmt: skip
def test_help_loads_nothing_heavy(command: str) -> None:
    arguments = [*command.split(), "--help"]
    code = (
        "import sys\n"
        "from kvfold.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'accelerate', 'rich'}\n"
        "heavy |= {'matplotlib', 'jinja2', 'huggingface_hub'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout
