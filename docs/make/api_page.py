"""The page of the Python API: its public names, which mkdocstrings fills with signatures and docstrings."""

import kvfold

INTRODUCTION = """# Python API

`import kvfold` loads no torch. A function imports what it needs when it is called. Nothing is printed:
notices go to the result and to the logger `kvfold`, progress goes to a callback. Every mistake in what you
pass is a `kvfold.InvalidInput`, which is a `ValueError`; only arguments that are missing or one too many are
Python's `TypeError`.
"""
FUNCTIONS = (
    "fold",
    "plan",
    "train",
    "evaluate",
    "verify",
    "quantize",
    "publish",
    "report",
    "migrate",
    "absorb",
)
RESULTS = (
    "kvfold.results.Folded",
    "kvfold.planning.recommendation.Candidates",
    "kvfold.results.TrainingRun",
    "kvfold.results.Measurements",
    "kvfold.engines.verify.VerificationReport",
    "kvfold.results.Quantized",
    "kvfold.results.Published",
    "kvfold.migration.migrate_call.Migrated",
)


def api_page() -> str:
    """Return the page in Markdown, with a section for every public name of kvfold."""
    names = [*FUNCTIONS, *(name for name in kvfold.__all__ if name not in FUNCTIONS)]
    parts = [INTRODUCTION]
    parts += [_section(_home(name), f"kvfold.{name}") for name in names]
    parts.append("## Results\n")
    parts += [_section(home, home.rpartition(".")[2], level=3) for home in RESULTS]
    return "\n".join(parts)


def _home(name: str) -> str:
    """Return where a public name is defined, as mkdocstrings reads it from the source."""
    found = getattr(kvfold, name)
    return f"{found.__module__}.{found.__qualname__}"


def _section(home: str, title: str, level: int = 2) -> str:
    return f"::: {home}\n    options:\n      heading: {title}\n      heading_level: {level}\n"
