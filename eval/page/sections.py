"""The sections of a page: figures and tables, and the command that measures what is missing."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...checkpoints.cost_blocks import CacheBlock, SpeedBlock
from ...checkpoints.quality_blocks import (
    FidelityBlock,
    GenerationBlock,
    GenerationDifference,
    NeedleMap,
    RetrievalBlock,
    SuiteBlock,
)
from . import quality, runs, tables
from .groups import Group
from .records import Found, command
from .tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT = "--text stdlib"


@dataclass(frozen=True)
class Chart:
    """A figure, its name among the PNGs, and its title."""

    name: str
    title: str
    drawn: "Figure"


@dataclass(frozen=True)
class PageSection:
    """A section of the page.

    Attributes:
        title: its heading.
        text: one or two sentences on reading it.
        charts: its figures.
        tables: its tables.
        missing: measurements that it lacks, each with the command that makes it.
    """

    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()


def sections(group: Group) -> tuple[PageSection, ...]:
    """Return the sections of a group's page, the main question first."""
    return (
        _perplexity(group),
        _fidelity(group),
        _layers(group),
        _needles(group),
        _generation(group),
        _tasks(group),
        _training(group),
        _speed(group),
    )


def _perplexity(group: Group) -> PageSection:
    without = [one for one in group.members if not quality.has_perplexity(one)]
    caches = tables.caches(group)
    return PageSection(
        "Perplexity against cache",
        "Lower and further left is better. Bars are 95 % intervals of the ratio to the source, paired by "
        "window. An arrow leads from a fold before distillation (hollow) to the distilled checkpoint. The "
        "cache per token is the growth of the running model's cache. Bytes are those of the number format "
        "that a cache was stored in.",
        _charts(
            ("perplexity", "Perplexity against cache", quality.perplexity_by_cache(group)),
            ("bytes", "Perplexity against bytes", quality.perplexity_by_bytes(group)),
            ("cache", "Cache per token", quality.cache_bars(group)),
        ),
        (tables.overview(group), *([caches] if caches else [])),
        (
            *_lacking(group, without, "perplexity against cache", f"{_TEXT} --suite ppl,cache"),
            *_lacking(group, _without(group, "cache", CacheBlock), "cache", "--suite cache --memory 24GB"),
        ),
    )


def _fidelity(group: Group) -> PageSection:
    without = _without(group, "fidelity", FidelityBlock)
    return PageSection(
        "Distance to the source",
        "KL(source ‖ checkpoint) of next-token distributions, per token. Bars are 95 % intervals over "
        "windows.",
        _charts(
            ("kl-percentiles", "KL by percentile of tokens", quality.kl_by_percentile(group)),
            ("kl-positions", "KL by position", quality.kl_by_position(group)),
        ),
        missing=_lacking(group, without, "distance to the source", f"{_TEXT} --suite fidelity"),
    )


def _layers(group: Group) -> PageSection:
    charts: list[Chart] = []
    seen: list[tuple[object, ...]] = []
    for number, one in enumerate(group.members):
        fold = (one.layers, one.target)
        if not one.layers or fold in seen:  # a distilled checkpoint carries the record of its fold
            continue
        seen.append(fold)
        charts += _charts(
            (f"layers-{number}", f"Loss by layer: {one.label}", runs.losses_by_layer(one, number)),
            (f"spectra-{number}", f"Spectrum of the latent: {one.label}", runs.spectra(one)),
        )
    missing: tuple[tuple[str, str], ...] = ()
    if not charts:
        example = "kvfold convert MODEL --to mla --kv-budget 25%"
        missing = (("losses and spectra by layer are written by the conversion", example),)
    return PageSection(
        "Layer by layer",
        "The loss of each layer: as planned, and as measured alone on held-back calibration text. For "
        "latent attention also the cost of leaving out each direction of its keys and values; the "
        "directions left of the dotted line are kept.",
        tuple(charts),
        missing=missing,
    )


def _needles(group: Group) -> PageSection:
    measured = group.measured("retrieval", RetrievalBlock)
    shown = [(str(number), one.label, found.student, found) for number, one, found in measured]
    for _, _, found in measured:
        if found.teacher is not None:
            shown.insert(0, ("source", "source", found.teacher, found))
            break
    charts: list[Chart] = []
    for slug, label, maps, found in shown:
        for kind, needles in maps.items():
            # Tiny models never generate a key exactly, but their likelihoods still differ.
            is_exact = _any_found(measured, kind)
            words = "found" if is_exact else f"right key likeliest of {found.candidates}"
            drawn = runs.needles(needles, needles.accuracy if is_exact else needles.choice)
            charts += _charts((f"needles-{kind}-{slug}", f"{kind}, % {words}: {label}", drawn))
    found_tables = [table for table in (tables.retrieval(group), tables.ruler(group)) if table is not None]
    return PageSection(
        "Needles in long texts",
        "Keys hidden in a long text: the percentage of prompts at which the key was found. RULER: the share "
        "of the wanted strings in generated answers.",
        tuple(charts),
        tuple(found_tables),
        _lacking(group, _without(group, "retrieval", RetrievalBlock), "needles", "--suite retrieval"),
    )


def _generation(group: Group) -> PageSection:
    table = tables.generation(group)
    verdicts = [
        f"{one.label} {verdict(found.difference)}"
        for _, one, found in group.measured("generation", GenerationBlock)
        if found.difference is not None
    ]
    return PageSection(
        "When it speaks",
        "What the models write, with the same prompts and random numbers. The KL on drawn text is the mean "
        f"of log p - log q of the tokens that p drew. {' '.join(verdicts)}".strip(),
        _charts(("agreement", "Greedy text that is still the source's", quality.agreement_by_length(group))),
        () if table is None else (table,),
        _lacking(
            group, _without(group, "generation", GenerationBlock), "text", f"{_TEXT} --suite generation"
        ),
    )


def verdict(found: GenerationDifference) -> str:
    """Return in a sentence how a checkpoint writes next to its source."""
    parts = [f"writes text that is {found.kl_own_text.mean:.3g} nats per token from its source's predictions"]
    if found.right is not None:
        points = 100 * found.right.mean
        low, high = found.right.low, found.right.high
        is_noise = low is not None and high is not None and low <= 0 <= high
        noise = " (within the noise)" if is_noise else ""
        worse = "worse" if points < 0 else "better"
        parts.append(f"answers {abs(points):.1f} points {worse}{noise}")
    if found.length is not None:
        change = found.length.mean - 1
        parts.append(f"its answers are {abs(change):.0%} {'longer' if change > 0 else 'shorter'}")
    return "; ".join(parts) + "."


def _any_found(measured: Iterable[tuple[int, Found, RetrievalBlock]], kind: str) -> bool:
    maps: list[NeedleMap | None] = []
    for _, _, found in measured:
        maps += [found.student.get(kind), (found.teacher or {}).get(kind)]
    return any(map(any, (row for one in maps if one is not None for row in one.accuracy)))


def _tasks(group: Group) -> PageSection:
    table = tables.tasks(group)
    return PageSection(
        "Benchmark tasks",
        "Scores on the same questions, paired with the source's.",
        tables=() if table is None else (table,),
        missing=() if table else _lacking(group, group.members, "benchmark tasks", "--suite tasks"),
    )


def _training(group: Group) -> PageSection:
    loss = runs.training_loss(list(enumerate(group.members)))
    charts = [*_charts(("training-loss", "KL on training text", loss))]
    for number, one in enumerate(group.members):
        title = f"Perplexity during training: {one.label}"
        charts += _charts((f"training-curve-{number}", title, runs.training_curve(one)))
    missing: tuple[tuple[str, str], ...] = ()
    if not charts:
        student = str(group.members[0].directory) if group.members else "DIR"
        missing = (("none of these checkpoints was distilled", f"kvfold distill {shlex.quote(student)}"),)
    return PageSection("Distillation", "The loss that training recovered.", tuple(charts), missing=missing)


def _speed(group: Group) -> PageSection:
    machines = [found.machine for _, _, found in group.measured("speed", SpeedBlock)]
    named = f", on {', '.join(dict.fromkeys(machines))}" if machines else ""
    table = tables.speeds(group)
    return PageSection(
        "Decode speed",
        f"The forward pass of transformers, source and checkpoint in turns{named}. Ratios compare such "
        "turns; speeds of different runs also depend on the other load of the machine.",
        _charts(
            ("speed-ratio", "Decoding speed relative to the source", runs.decode_ratio(group)),
            ("speed", "Decoding speed", runs.decode_speed(group)),
        ),
        () if table is None else (table,),
        _lacking(group, _without(group, "speed", SpeedBlock), "speed", "--suite speed"),
    )


def _charts(*drawn: "tuple[str, str, Figure | None]") -> tuple[Chart, ...]:
    return tuple(Chart(name, title, figure) for name, title, figure in drawn if figure is not None)


def _without(group: Group, name: str, kind: type[SuiteBlock]) -> list[Found]:
    return [one for one in group.members if one.report.block(name, kind) is None]


def _lacking(group: Group, lacking: Iterable[Found], what: str, options: str) -> tuple[tuple[str, str], ...]:
    """Return a missing measurement and the command that makes it for the first member that lacks it.

    The command writes a file of its own, since a report is never overwritten.
    """
    without = list(lacking)
    if not without:
        return ()
    names = "not measured"
    if len(without) < len(group.members):
        names = f"not measured for {', '.join(one.label for one in without)}"
    suite = options.rpartition("--suite ")[2].partition(" ")[0].replace(",", "-")
    return ((f"{what}: {names}", command(without[0].directory, options, f"eval-{suite}.json")),)
