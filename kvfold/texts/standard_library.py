"""The source text of Python's standard library, of the running interpreter.

The modules of `HELD_OUT` are evaluation text, and all others are training text. No function here mixes the
two.
"""

import sysconfig
from pathlib import Path

# Single-file modules present in CPython 3.11 to 3.14.
HELD_OUT = (
    "argparse", "calendar", "configparser", "csv", "difflib", "fractions", "graphlib", "heapq", "mailbox",
    "plistlib",
    "queue", "random", "sched", "shelve", "shlex", "statistics", "tarfile", "textwrap", "timeit", "uuid",
    "wave", "zipapp",
)  # fmt: skip
# Not the library itself: installed packages, tests (some quote the modules they test), build leftovers.
_EXCLUDED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
    "ensurepip",
    "_pyrepl",
}


def stdlib_documents(held_out: bool) -> tuple[str, ...]:
    """Return source files of the standard library in a fixed order.

    Args:
        held_out: True for the evaluation part, False for the training part.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if held_out:
        return tuple((root / f"{module}.py").read_text(encoding="utf-8") for module in HELD_OUT)
    files = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _EXCLUDED.intersection(path.relative_to(root).parts)
        and "config-" not in str(path.relative_to(root))
    )
    held = {Path(f"{module}.py") for module in HELD_OUT}
    texts = (
        (root / file).read_text(encoding="utf-8", errors="replace") for file in files if file not in held
    )
    return tuple(text for text in texts if text.strip())
