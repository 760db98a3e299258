"""Texts that need no network: files, and the source text of the running interpreter's standard library.

The standard library is split once and for all: the modules of `HELD_OUT` are evaluation text, everything else is
training text. Nothing here ever mixes the two.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ..convert.errors import InvalidInput

# Single-file modules present in CPython 3.11 to 3.14.
HELD_OUT = (
    "argparse", "calendar", "configparser", "csv", "difflib", "fractions", "graphlib", "heapq", "mailbox", "plistlib",
    "queue", "random", "sched", "shelve", "shlex", "statistics", "tarfile", "textwrap", "timeit", "uuid", "wave", "zipapp",
)  # fmt: skip
# Not the library itself: other people's packages, tests (some quote the modules they test), build leftovers.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "ensurepip", "_pyrepl"}


@dataclass(frozen=True)
class Text:
    """Named documents.

    Attributes:
        name: what a report calls the text, e.g. `stdlib` or `text:novel.txt`.
        documents: the text, one string a document.
    """

    name: str
    documents: tuple[str, ...]

    @property
    def joined(self) -> str:
        """The documents as one string, an empty line between two."""
        return "\n\n".join(self.documents)

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of `joined` in UTF-8: which text a number was measured on."""
        return hashlib.sha256(self.joined.encode()).hexdigest()


def read_text(text: str) -> Text:
    """The evaluation text a user named.

    Args:
        text: `stdlib` (the held-out modules of the running interpreter) or the path of a UTF-8 text file.

    Raises:
        InvalidInput: the file is missing, is not UTF-8 or holds only white space.
    """
    if text == "stdlib":
        return Text("stdlib", stdlib_documents(held_out=True))
    path = Path(text)
    if not path.is_file():
        raise InvalidInput(f"{text} is not a file; --text takes a UTF-8 text file or the word stdlib")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{text} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv -t UTF-8") from None
    if not content.strip():
        raise InvalidInput(f"{text} holds no text; an evaluation needs at least one window of it")
    return Text(f"text:{path.name}", (content,))


def stdlib_documents(held_out: bool) -> tuple[str, ...]:
    """Source files of the standard library in a fixed order: the evaluation part (`held_out`) or the training part."""
    root = Path(sysconfig.get_path("stdlib"))
    if held_out:
        return tuple((root / f"{module}.py").read_text(encoding="utf-8") for module in HELD_OUT)
    files = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _EXCLUDED.intersection(path.relative_to(root).parts) and "config-" not in str(path.relative_to(root))
    )
    held = {Path(f"{module}.py") for module in HELD_OUT}
    texts = ((root / file).read_text(encoding="utf-8", errors="replace") for file in files if file not in held)
    return tuple(text for text in texts if text.strip())
