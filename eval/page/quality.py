"""Figures of what a smaller cache costs in quality: perplexity and KL."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .blocks import Caches, Estimate, Fidelity, Perplexities
from .canvas import LIGHT, brief, figure, legend, plain_log, series, tip
from .groups import Group
from .records import Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = {"gqa": "s", "mqa": "^", "mla": "o"}  # by what it was folded to
_WIDE = 2.0  # ratio of the largest to the smallest value from which an axis is logarithmic


def has_perplexity(one: Found) -> bool:
    """Whether a checkpoint has a place in `perplexity_by_cache`."""
    return one.share is not None and one.suite("ppl", Perplexities) is not None


def perplexity_by_cache(group: Group) -> "Figure | None":
    """Perplexity against the share of the source's cache.

    Error bars are of the paired ratio to the source.
    """
    members = [(number, one) for number, one in enumerate(group.members) if has_perplexity(one)]
    if not members:
        return None
    drawn, axes = figure(3.4)
    source = source_perplexity(group)
    if source is not None:
        axes.axhline(source, color=LIGHT["muted"], linestyle="--", linewidth=1)
        points = axes.plot(
            [100], [source], marker="D", color=LIGHT["muted"], linestyle="none", label="source"
        )
        tip(points, f"source: perplexity {source:.4g}")
    values = [source] if source is not None else []
    places = _dodged([one.share or 1.0 for _, one in members])
    for (number, one), place in zip(members, places, strict=True):
        values += _point(axes, one, number, place)
    axes.set_xscale("log", base=2)
    _percents(axes, [one.share or 1.0 for _, one in members])
    if max(values) / min(values) > _WIDE:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.set(xlabel="KV cache, % of the source's", ylabel="perplexity")
    legend(drawn, axes)
    return drawn


def source_perplexity(group: Group) -> float | None:
    """Of the source on the group's text, as measured beside a member, or alone."""
    for one in group.everyone:
        found = one.suite("ppl", Perplexities)
        if found is not None and found.teacher is not None:
            return found.teacher.perplexity
    itself = group.itself and group.itself.suite("ppl", Perplexities)
    return itself.student.perplexity if itself else None


def bounds(one: Found) -> tuple[float, float] | None:
    """The 95 % interval of a perplexity.

    Of its ratio to the source's, which shares the text, or else its own.
    """
    found = one.suite("ppl", Perplexities)
    if found is None:
        return None
    if (
        found.teacher is not None
        and found.ratio is not None
        and found.ratio.low is not None
        and found.ratio.high is not None
    ):
        return found.ratio.low * found.teacher.perplexity, found.ratio.high * found.teacher.perplexity
    if found.teacher is not None or found.student.nll.low is None or found.student.nll.high is None:
        return None
    return math.exp(min(found.student.nll.low, 700.0)), math.exp(min(found.student.nll.high, 700.0))


def _dodged(shares: Sequence[float]) -> list[float]:
    """Percentages that are almost those of the shares.

    Equal ones stand side by side, so that each is seen.
    """
    found = []
    for number, share in enumerate(shares):
        alike = [other for other, theirs in enumerate(shares) if abs(theirs / share - 1) < 0.03]
        found.append(100 * share * 2 ** (0.09 * (alike.index(number) - (len(alike) - 1) / 2)))
    return found


def _point(axes: "Axes", one: Found, number: int, place: float) -> list[float]:
    """Draw a checkpoint, and the fold it was distilled from below or above it.

    All perplexities that were drawn.
    """
    found = one.suite("ppl", Perplexities)
    assert found is not None
    colour, marker = series(number), _MARKERS.get(str(one.target.get("name")), "o")
    value = found.student.perplexity
    values = [value]
    if found.parent is not None:
        before = found.parent.perplexity
        axes.annotate(
            "",
            (place, value),
            (place, before),
            arrowprops={"arrowstyle": "->", "color": colour, "shrinkA": 4, "shrinkB": 4},
        )
        hollow = axes.plot(
            [place], [before], marker=marker, color=colour, markerfacecolor=LIGHT["surface"], linestyle="none"
        )
        tip(hollow, f"{one.label} before distillation: perplexity {before:.4g}")
        values.append(before)
    low, high = bounds(one) or (value, value)
    bars = axes.errorbar(
        [place], [value], yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color=colour, capsize=3
    )
    bars.lines[0].set(marker=marker, linestyle="none", label=brief(one.label))
    tip(
        [bars.lines[0]],
        f"{one.label}: perplexity {value:.4g} at {100 * (one.share or 1.0):.3g} % of the cache",
    )
    return values


def _percents(axes: "Axes", shares: Sequence[float]) -> None:
    """Ticks at halves of 100 %, down to below the smallest share."""
    ticks = [100.0]
    while ticks[-1] > 100 * min(shares) * 1.01:
        ticks.append(ticks[-1] / 2)
    most = max(100.0, *(100 * share for share in shares))
    axes.set_xlim(ticks[-1] / 1.25, most * 1.25)
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()


def cache_bars(group: Group) -> "Figure | None":
    """Elements that a token takes in a layer's cache, of the source and of every checkpoint."""
    members = [
        (number, one, found)
        for number, one in enumerate(group.members)
        if (found := one.suite("cache", Caches))
    ]
    if not members:
        return None
    source = next((found.teacher for _, _, found in members if found.teacher), None)
    rows = [("source", source.elements_per_token_per_layer, LIGHT["muted"])] if source else []
    rows += [
        (brief(one.label, 26), found.student.elements_per_token_per_layer, series(n))
        for n, one, found in members
    ]
    drawn, axes = figure(0.8 + 0.32 * len(rows))
    longest = max(value for _, value, _ in rows)
    for place, (name, value, colour) in enumerate(rows):
        tip(axes.barh(place, value, color=colour, height=0.7).patches, f"{name}: {value:g} elements")
        share = f"  ({100 * value / rows[0][1]:.3g} %)" if source and place else ""
        axes.text(value + longest * 0.015, place, f"{value:,.5g}{share}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="elements per token and layer", xlim=(0, longest * 1.3))
    return drawn


def kl_by_percentile(group: Group) -> "Figure | None":
    """KL to the source at percentiles of the tokens, with 95 % intervals; the last is the largest of all."""
    members = _with_fidelity(group)
    if not members:
        return None
    drawn, axes = figure(3.4)
    keys = list(members[0][2].kl_percentiles)
    for number, one, found in members:
        shared = [
            (place, found.kl_percentiles[key])
            for place, key in enumerate(keys)
            if key in found.kl_percentiles
        ]
        points = [*shared, (len(keys), Estimate(mean=found.kl_max))]
        _line(axes, [(place, value) for place, value in points if value.mean > 0], one, number)
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_xticks(range(len(keys) + 1), [*(key[1:].replace("_", ".") for key in keys), "max"])
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set(xlabel="percentile of tokens", ylabel="KL to the source, nats")
    legend(drawn, axes)
    return drawn


def kl_by_position(group: Group) -> "Figure | None":
    """KL to the source by how many tokens stand before, with 95 % intervals."""
    members = [(number, one, found) for number, one, found in _with_fidelity(group) if found.kl_by_position]
    if not members:
        return None
    drawn, axes = figure(3.4)
    for number, one, found in members:
        _line(
            axes,
            [((bucket.first * bucket.last) ** 0.5, bucket.kl) for bucket in found.kl_by_position],
            one,
            number,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens before in the window", ylabel="KL to the source, nats")
    legend(drawn, axes)
    return drawn


def _with_fidelity(group: Group) -> list[tuple[int, Found, Fidelity]]:
    return [
        (number, one, found)
        for number, one in enumerate(group.members)
        if (found := one.suite("fidelity", Fidelity))
    ]


def _line(axes: "Axes", points: Sequence[tuple[float, Estimate]], one: Found, number: int) -> None:
    if not points:
        return
    places = [place for place, _ in points]
    values = [value.mean for _, value in points]
    sizes: Any = [
        [max(0.0, value.mean - value.low) if value.low is not None else 0.0 for _, value in points],
        [max(0.0, value.high - value.mean) if value.high is not None else 0.0 for _, value in points],
    ]
    style: dict[str, Any] = {
        "marker": "o",
        "markersize": 3.5,
        "linewidth": 1.4,
        "capsize": 2,
        "elinewidth": 1,
    }
    bars = axes.errorbar(places, values, yerr=sizes, color=series(number), label=brief(one.label), **style)
    tip([bars.lines[0]], one.label)
