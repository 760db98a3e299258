"""`kvfold.migrate`, the command as a function of Python, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arguments import path_of, public, text_of
from ..core.console import ProgressCallback, calling
from ..core.errors import InvalidInput
from ..core.grid import Grid, Tabular


@dataclass(frozen=True, kw_only=True, repr=False)
class Migrated(Tabular):
    """A finished migration.

    Attributes:
        directory: the checkpoint of the smallest cache that stays within the bound. If none does, `met` is
            false, and this is the nearest step, in `<out>.unmet`.
        report: what report.json has: `until`, `chosen`, `steps` with the numbers of each, `not_tried`.
        notices: sentences that the user should know.
    """

    directory: Path
    report: dict[str, Any]
    notices: tuple[str, ...]

    @property
    def met(self) -> bool:
        """Return whether a step stayed within the bound."""
        return bool(self.report["met"])

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return every step that was tried: `cache_ratio`, `perplexity`, `kl`, `met` and more."""
        return list(self.report["steps"])

    def grid(self) -> Grid:
        """Return a line for each step."""
        return migration_grid(self.report)


def migration_grid(report: Mapping[str, Any]) -> Grid:
    """Return the report of a migration as a table."""
    rows = []
    for step in report["steps"]:
        ppl, share, ratio = step["perplexity"], step["recovered_share"], step["perplexity_ratio"]
        numbers = [f"{ppl[who]:.4g}" for who in ("source", "folded", "distilled")]
        recovered = "" if share is None else f"{share:.1%}"
        interval = "" if ratio["low"] is None else f" [{ratio['low']:.4f}, {ratio['high']:.4f}]"
        cells = (
            f"{step['cache_ratio']:.1%}",
            *numbers,
            f"{ratio['mean']:.4f}{interval}",
            f"{step['kl']['mean']:.4f}",
        )
        name = step["step"] if step["kept"] == "distilled" else f"{step['step']} (fold)"
        rows.append((name, *cells, recovered, "yes" if step["met"] else "no"))
    columns = (
        "step",
        "cache",
        "source",
        "folded",
        "distilled",
        "times source's [95 %]",
        "KL, nats",
        "recovered",
        report["until"],
    )
    proof = report["identity"]
    kept = (
        f"KL {proof['kl']:.1e} nats when everything is kept"
        if proof["checked"]
        else "not compared with everything kept"
    )
    return Grid(f"{report['source']} to {report['to']}: {kept}", columns, rows)


@public
def migrate(
    source: str | Path,
    to: str,
    *,
    until: str,
    out: str | Path,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Migrated:
    """Find the smallest cache at which a bound still holds after a short distillation.

    The source is folded to falling shares of its cache, each fold is distilled and evaluated on held-out
    text, and the smallest that stays within the bound becomes `out`. The same call resumes a run that was
    stopped. If no step stayed within the bound, a call with another bound resumes the run.

    Args:
        source: a directory, or a Hub id with an optional `@revision`.
        to: attention of the output: `gqa`, `mqa` or `mla`.
        until: the bound: `ppl<1.02x` (times the source's perplexity), or a condition about perplexity or
            fidelity as of `kvfold eval --assert`, such as `kl<0.05`.
        out: a new directory.
        progress: called with a description, how many items are done and how many there are.
        options: fields of `kvfold.migration.migration_options.MigrationOptions`, such as `text` or
            `tokens_per_step`.

    Returns:
        The output and the numbers of every step. Its `met` is false if no step stayed within the bound.

    Raises:
        InvalidInput: a value is unusable, a part of the work refuses its input, or a fold fails its check.
        kvfold.core.signals.Interrupted: SIGINT or SIGTERM stopped a training; its state is saved.

    Example:
        >>> import kvfold
        >>> found = kvfold.migrate("my-model", "mla", until="ppl<1.02x", out="small")  # doctest: +SKIP
        >>> found.met, found.report["chosen"]  # doctest: +SKIP
        (True, '25%')
    """
    from ..eval.assertions import Unmet
    from .migration_options import MigrationOptions
    from .request import read_request
    from .steps import migrate as carry_out

    given = {"model": text_of(source, "source"), "to": to, "until": until, "out": path_of(out, "out")}
    with calling(progress) as heard:
        asked = read_request(MigrationOptions.read({**given, **options}))
        try:
            report = carry_out(asked)
        except Unmet as failure:  # of a check on the way; a bound that no step holds is no error
            raise InvalidInput(failure.message) from None
    return Migrated(directory=Path(report["out"]), report=report, notices=tuple(heard.notices))
