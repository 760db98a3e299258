"""The layers of the packages: who may import whom, no cycles, and no heavy import behind `--help`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("convert", "distill", "eval")
LOW = {
    "core": set[str](),
    "checkpoints": {"core"},
    "models": {"core", "checkpoints"},
    "texts": {"core", "checkpoints", "models"},
}
MAY_IMPORT = {
    **LOW,
    "convert": {*LOW},
    "eval": {*LOW, "convert"},
    "distill": {*LOW, "convert", "eval"},
}  # what stands above these (planning, verification, publishing, migration, lab, the API) may import all of them
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


def test_parts_import_only_what_stands_below() -> None:
    wrong = []
    for name in FILES:
        folder = name.split(".")[1] if name.count(".") else ""
        if folder not in MAY_IMPORT or name.rpartition(".")[2] in PROGRAMS:
            continue
        for target in imported(name):
            other = target.split(".")[1] if "." in target else ""
            if other and other != folder and other not in MAY_IMPORT[folder]:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_a_fold_flows_one_way_through_folders() -> None:
    """From algebra to what is written; what a folder may not import stands behind it."""
    above = ["write", "settle", "decide", "layer"]
    barred = {folder: above[:at] for at, folder in enumerate(above)}
    barred |= {"methods": above, "formats": above, "calibration": above}
    barred["algebra"] = [*above, "methods", "formats", "calibration", "families", "storage"]
    wrong = [
        f"{name} imports {target}"
        for name in FILES
        for target in imported(name)
        if name.startswith("kvfold.convert.") and target.startswith("kvfold.convert.")
        if target.split(".")[2] in barred.get(name.split(".")[2], ())
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


@pytest.mark.parametrize(
    "command",
    [
        "",
        "convert",
        "distill",
        "eval",
        "verify",
        "publish",
        "demo",
        "families",
        "engines",
        "plan",
        "report",
        "migrate",
        "quantize",
    ],
)
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
