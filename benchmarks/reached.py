"""Tokens that runs needed to come as close to their source as was wanted.

Pure functions of the rows of benchmarks.recovery.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

SHARES = (0.90, 0.95, 0.99)  # of the loss of a target's plain start
PLAIN, USUAL = "plain", "ce"  # the start and the recipe that others are measured by
Row = dict[str, Any]


def wanted(plain: float, source: float, share: float) -> float:
    """The perplexity at which a share of the loss of the plain start is made up for.

    Both arguments are perplexities.
    """
    return math.exp(math.log(source) + (1 - share) * (math.log(plain) - math.log(source)))


def tokens_to(points: Sequence[Row], perplexity: float) -> float | None:
    """Tokens after which a curve first is at or below a perplexity, its logarithm taken as straight between
    evaluations.

    Args:
        points: `tokens` and `perplexity` of each evaluation, in the order of training.
        perplexity: to be reached.

    Returns:
        Tokens, 0 where the start was there already; None where no evaluation is.
    """
    for number, point in enumerate(points):
        if point["perplexity"] <= perplexity:
            if number == 0:
                return 0.0
            before = points[number - 1]
            high, low = math.log(before["perplexity"]), math.log(point["perplexity"])
            part = (high - math.log(perplexity)) / (high - low)
            return float(before["tokens"] + part * (point["tokens"] - before["tokens"]))
    return None


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One line for every target, start and recipe, over its seeds.

    Targets are absolute: shares of the loss of the target's plain start, whatever a run began with. The
    source trained on the same tokens has lines of its own, without targets.

    Args:
        rows: of finished runs; see `recovery.train`.

    Returns:
        `perplexity` at the end and `recovered`, medians with least and most; for every share `reached`: how
        many seeds got there, the median of their tokens, and those of each seed (None: not within the run);
        and `as_usual`, the same for the perplexity at which cross entropy from the plain start ends with the
        same seed.
    """
    plain = {row["target"]: row["points"][0]["perplexity"] for row in rows if row["start"] == PLAIN}
    usual = {
        (row["target"], row["seed"]): row for row in rows if (row["start"], row["recipe"]) == (PLAIN, USUAL)
    }
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["target"], row["start"], row["recipe"]].append(row)
    lines = []
    for (target, start, recipe), own in groups.items():
        line: Row = {
            "target": target,
            "start": start,
            "recipe": recipe,
            "seeds": [row["seed"] for row in own],
        }
        line |= {"source": own[0]["source"], "perplexity_at_start": own[0]["points"][0]["perplexity"]}
        line["perplexity"] = _spread([row["points"][-1]["perplexity"] for row in own])
        line["kl"] = _spread([row["points"][-1]["kl"] for row in own])
        if target in plain:
            line["recovered_at_start"] = _recovered(own[0]["points"][0], plain[target], own[0]["source"])
            line["recovered"] = _spread(
                [_recovered(row["points"][-1], plain[target], row["source"]) for row in own]
            )
            goals = {
                f"{share:.0%}": [wanted(plain[target], row["source"], share) for row in own]
                for share in SHARES
            }
            line["reached"] = {name: _reached(own, goal) for name, goal in goals.items()}
            compared = [row for row in own if (target, row["seed"]) in usual]
            ends = [usual[target, row["seed"]]["points"][-1]["perplexity"] for row in compared]
            line["as_usual"] = _reached(compared, ends) if compared else None
        lines.append(line)
    return lines


def _recovered(point: Row, plain: float, source: float) -> float:
    """Share of the plain start's loss that is made up for."""
    return (math.log(plain) - math.log(point["perplexity"])) / (math.log(plain) - math.log(source))


def _reached(rows: Sequence[Row], goals: Sequence[float]) -> Row:
    """Tokens to one perplexity for each row."""
    tokens = [tokens_to(row["points"], goal) for row, goal in zip(rows, goals, strict=True)]
    # The middle one over all seeds, so that those that never arrived count as the longest.
    middle = statistics.median_high([math.inf if number is None else number for number in tokens])
    return {
        "seeds": sum(number is not None for number in tokens),
        "median": round(middle) if math.isfinite(middle) else None,
        "tokens": [None if number is None else round(number) for number in tokens],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
