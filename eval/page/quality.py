"""Figures of the quality that a smaller cache costs: perplexity and KL."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...checkpoints.cost_blocks import CacheBlock
from ...checkpoints.quality_blocks import Estimate, FidelityBlock, GenerationBlock, PerplexityBlock
from .canvas import LIGHT, brief, figure, legend, plain_log, series, tip
from .groups import Group
from .records import Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = {"gqa": "s", "mqa": "^", "mla": "o"}  # by the target of the fold
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a number in the dtypes of checkpoints
_WIDE = 2.0  # ratio of the largest to the smallest value from which an axis is logarithmic


def has_perplexity(one: Found) -> bool:
    """Return whether a checkpoint has a place in `perplexity_by_cache`."""
    return one.cache_ratio is not None and one.report.block("ppl", PerplexityBlock) is not None


def perplexity_by_cache(group: Group) -> "Figure | None":
    """Draw perplexity against the size of the cache relative to the source's.

    Error bars are those of the paired ratio to the source.
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
    places = _dodged([one.cache_ratio or 1.0 for _, one in members])
    for (number, one), place in zip(members, places, strict=True):
        values += _point(axes, one, number, place)
    axes.set_xscale("log", base=2)
    # Ticks at 100 %, 50 %, 25 % and so on, down to below the smallest ratio.
    ratios = [one.cache_ratio or 1.0 for _, one in members]
    ticks = [100.0]
    while ticks[-1] > 100 * min(ratios) * 1.01:
        ticks.append(ticks[-1] / 2)
    most = max(100.0, *(100 * ratio for ratio in ratios))
    axes.set_xlim(ticks[-1] / 1.25, most * 1.25)
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    if max(values) / min(values) > _WIDE:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.set(xlabel="KV cache, % of the source's", ylabel="perplexity")
    legend(drawn, axes)
    return drawn


def perplexity_by_bytes(group: Group) -> "Figure | None":
    """Draw perplexity against the bytes of a token in the cache, a line for each checkpoint.

    Its points are the number formats that its cache was measured in. None where it was in none.
    """
    lines = [(number, one, points_by_bytes(one)) for number, one in enumerate(group.members)]
    if not any(report.cache_dtype for one in group.members for report in (one.report, *one.formats)):
        return None
    drawn, axes = figure(3.4)
    for number, one, points in lines:
        if not points:
            continue
        sizes, values, names = zip(*points, strict=True)
        marker = _MARKERS.get(str(one.target.get("name")), "o")
        line = axes.plot(
            sizes, values, marker=marker, color=series(number), linewidth=1, label=brief(one.label)
        )
        tip(line, f"{one.label}: {', '.join(names)}")
        for size, value, name in points:
            axes.annotate(
                name, (size, value), (3, 3), textcoords="offset points", fontsize=7, color=LIGHT["muted"]
            )
    source = source_perplexity(group)
    if source is not None:
        axes.axhline(source, color=LIGHT["muted"], linestyle="--", linewidth=1, label="source")
    axes.set_xscale("log", base=2)
    plain_log(axes.xaxis)
    axes.set(xlabel="bytes per token in the cache, all layers", ylabel="perplexity")
    legend(drawn, axes)
    return drawn


def points_by_bytes(one: Found) -> list[tuple[float, float, str]]:
    """Return bytes per token, perplexity and format of every report of a checkpoint, fewest bytes first."""
    points = []
    for report in (one.report, *one.formats):
        scores = report.block("ppl", PerplexityBlock)
        caches = report.block("cache", CacheBlock)
        if scores is None or caches is None:
            continue
        model = caches.student
        size = model.quantised_bytes_per_token
        if size is None:
            size = model.elements_per_token * _BYTES[model.stored_dtype]
        points.append((size, scores.student.perplexity, report.cache_dtype or model.stored_dtype))
    return sorted(points)


def source_perplexity(group: Group) -> float | None:
    """Return the source's perplexity on the group's text, measured with a member or alone."""
    for one in group.everyone:
        found = one.report.block("ppl", PerplexityBlock)
        if found is not None and found.teacher is not None:
            return found.teacher.perplexity
    if group.itself is None:
        return None
    found = group.itself.report.block("ppl", PerplexityBlock)
    return None if found is None else found.student.perplexity


def bounds(one: Found) -> tuple[float, float] | None:
    """Return the 95 % interval of a perplexity; None where there is none.

    It is the interval of the ratio to the source's perplexity where that was measured, since both share the
    difficulty of the text; otherwise its own.
    """
    found = one.report.block("ppl", PerplexityBlock)
    if found is None:
        return None
    if found.teacher is None:
        nll = found.student.nll
        if nll.low is None or nll.high is None:
            return None
        return math.exp(min(nll.low, 700.0)), math.exp(min(nll.high, 700.0))
    ratio = found.ratio
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return ratio.low * found.teacher.perplexity, ratio.high * found.teacher.perplexity


def _dodged(ratios: Sequence[float]) -> list[float]:
    """Return the ratios in percent, with equal ones moved a little apart so that each can be seen."""
    found = []
    for number, ratio in enumerate(ratios):
        alike = [other for other, theirs in enumerate(ratios) if abs(theirs / ratio - 1) < 0.03]
        found.append(100 * ratio * 2 ** (0.09 * (alike.index(number) - (len(alike) - 1) / 2)))
    return found


def _point(axes: "Axes", one: Found, number: int, place: float) -> list[float]:
    """Draw a checkpoint, and with an arrow the fold that it was distilled from.

    Returns:
        All perplexities that were drawn.
    """
    found = one.report.block("ppl", PerplexityBlock)
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
        f"{one.label}: perplexity {value:.4g} at {100 * (one.cache_ratio or 1.0):.3g} % of the cache",
    )
    return values


def cache_bars(group: Group) -> "Figure | None":
    """Draw the cached elements per token and layer of the source and of every checkpoint."""
    members = group.measured("cache", CacheBlock)
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
        percent = f"  ({100 * value / rows[0][1]:.3g} %)" if source and place else ""
        axes.text(value + longest * 0.015, place, f"{value:,.5g}{percent}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="elements per token and layer", xlim=(0, longest * 1.3))
    return drawn


def kl_by_percentile(group: Group) -> "Figure | None":
    """Draw the KL to the source at percentiles of the tokens, with 95 % intervals, and its maximum last."""
    members = group.measured("fidelity", FidelityBlock)
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
    """Draw the KL to the source by the number of tokens before, with 95 % intervals."""
    measured = group.measured("fidelity", FidelityBlock)
    members = [(number, one, found) for number, one, found in measured if found.kl_by_position]
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
    axes.set(xlabel="preceding tokens in the window", ylabel="KL to the source, nats")
    legend(drawn, axes)
    return drawn


def agreement_by_length(group: Group) -> "Figure | None":
    """Draw the share of greedy texts that begin as the source's do, by the number of tokens."""
    measured = [
        (number, one, found.difference.agreement)
        for number, one, found in group.measured("generation", GenerationBlock)
        if found.difference is not None
    ]
    if not measured:
        return None
    drawn, axes = figure(3.4)
    for number, one, agreement in measured:
        _line(axes, [(float(tokens), share) for tokens, share in agreement.items()], one, number)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set(xlabel="tokens written", ylabel="share of texts that are still the source's")
    legend(drawn, axes)
    return drawn


def _line(axes: "Axes", points: Sequence[tuple[float, Estimate]], one: Found, number: int) -> None:
    if not points:
        return
    places = [place for place, _ in points]
    values = [value.mean for _, value in points]
    sizes: Any = [
        [max(0.0, value.mean - value.low) if value.low is not None else 0.0 for _, value in points],
        [max(0.0, value.high - value.mean) if value.high is not None else 0.0 for _, value in points],
    ]
    bars = axes.errorbar(
        places, values, yerr=sizes, color=series(number), label=brief(one.label),
        marker="o", markersize=3.5, linewidth=1.4, capsize=2, elinewidth=1,
    )  # fmt: skip
    tip([bars.lines[0]], one.label)
