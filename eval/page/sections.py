"""A page's parts: what each shows, and where there is nothing to show the command that measures it."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import depth, quality, runs, tables
from .blocks import Caches, Fidelity, Perplexities, Retrieval, Speeds
from .groups import Group
from .records import Found, command
from .tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT = "--text stdlib"


@dataclass(frozen=True)
class Chart:
    """A figure, its name among the PNGs, and what stands above it."""

    name: str
    title: str
    drawn: "Figure"


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: of it.
        text: how to read it, in a sentence or two.
        charts, tables: what it shows.
        missing: what it could show if it were measured, each with its command.
    """

    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()


def sections(group: Group) -> tuple[Section, ...]:
    """The parts of a group's page, in the order in which questions come up."""
    return (
        _perplexity(group),
        _fidelity(group),
        _layers(group),
        _needles(group),
        _tasks(group),
        _training(group),
        _speed(group),
    )


def _perplexity(group: Group) -> Section:
    without = [one for one in group.members if not quality.has_perplexity(one)]
    caches = tables.caches(group)
    return Section(
        "Perplexity against cache",
        "Lower and further left is better. Bars are 95 % intervals of the ratio to the source, paired by "
        "window; an arrow "
        "leads from a fold before distillation (hollow) to the distilled checkpoint. A token's cache is "
        "what the cache object "
        "of the running model grows by.",
        _charts(
            ("perplexity", "Perplexity against cache", quality.perplexity_by_cache(group)),
            ("cache", "Cache of a token", quality.cache_bars(group)),
        ),
        (tables.overview(group), *([caches] if caches else [])),
        (
            *_lacking(group, without, "perplexity against cache", f"{_TEXT} --suite ppl,cache"),
            *_lacking(group, _without(group, "cache", Caches), "cache", "--suite cache --memory 24GB"),
        ),
    )


def _fidelity(group: Group) -> Section:
    charts = _charts(
        ("kl-percentiles", "KL by percentile of tokens", quality.kl_by_percentile(group)),
        ("kl-positions", "KL by position", quality.kl_by_position(group)),
    )
    missing = _lacking(
        group, _without(group, "fidelity", Fidelity), "distance to the source", f"{_TEXT} --suite fidelity"
    )
    return Section(
        "Distance to the source",
        "KL(source ‖ checkpoint) of next-token distributions, token by token; bars are 95 % intervals "
        "over windows.",
        charts,
        missing=missing,
    )


def _layers(group: Group) -> Section:
    charts: list[Chart] = []
    seen: list[tuple[object, ...]] = []
    for number, one in enumerate(group.members):
        conversion = (one.layers, one.target)
        if (
            not one.layers or conversion in seen
        ):  # a distilled checkpoint carries the record of the fold it began as
            continue
        seen.append(conversion)
        charts += _charts(
            (f"layers-{number}", f"Loss by layer: {one.label}", depth.losses_by_layer(one, number)),
            (f"spectra-{number}", f"Spectrum of the latent: {one.label}", depth.spectra(one)),
        )
    missing = []
    if not charts:
        missing.append(
            (
                "losses and spectra by layer are written by the conversion",
                "kvfold convert MODEL --to mla --kv-budget 25%",
            )
        )
    return Section(
        "Layer by layer",
        "Each layer's loss as planned and as measured alone on held-back calibration text; and, for "
        "latent attention, what "
        "each direction of its keys and values costs when it is left out. Those left of the dotted line "
        "are kept.",
        tuple(charts),
        missing=tuple(missing),
    )


def _needles(group: Group) -> Section:
    charts: list[Chart] = []
    shown = [(str(number), one.label, found.student, found) for number, one, found in _retrieved(group)]
    first = next((found for *_, found in shown if found.teacher), None)
    if first is not None and first.teacher is not None:
        shown.insert(0, ("source", "source", first.teacher, first))
    for slug, label, kinds, found in shown:
        for kind, map_ in (("passkey", kinds.passkey), ("multikey", kinds.multikey)):
            # Where nothing is ever generated right, as by tiny models, the likelihoods still tell.
            score = "accuracy" if any(map(any, _grids(group, kind))) else "choice"
            words = "found" if score == "accuracy" else f"right key likeliest of {found.candidates}"
            title = f"{kind}, % {words}: {label}"
            charts += _charts((f"needles-{kind}-{slug}", title, runs.needles(map_, score)))
    table = tables.retrieval(group)
    return Section(
        "Needles in long texts",
        "Keys hidden at a depth of a text, in percent of the prompts at which they were found.",
        tuple(charts),
        () if table is None else (table,),
        _lacking(group, _without(group, "retrieval", Retrieval), "needles", "--suite retrieval"),
    )


def _tasks(group: Group) -> Section:
    table = tables.tasks(group)
    missing = () if table else _lacking(group, group.members, "benchmark tasks", "--suite tasks")
    return Section(
        "Benchmark tasks",
        "Scores of the same questions, paired with the source's.",
        tables=() if table is None else (table,),
        missing=missing,
    )


def _training(group: Group) -> Section:
    charts = [
        *_charts(("training-loss", "KL on training text", runs.training_loss(list(enumerate(group.members)))))
    ]
    for number, one in enumerate(group.members):
        charts += _charts(
            (f"training-curve-{number}", f"Perplexity while training: {one.label}", runs.training_curve(one))
        )
    missing: tuple[tuple[str, str], ...] = ()
    if not charts:
        student = str(group.members[0].directory) if group.members else "DIR"
        recipe = f"kvfold distill RECIPE.yaml --set student={shlex.quote(student)} --set output=NEW"
        missing = (("no checkpoint here was distilled", recipe),)
    return Section("Distillation", "What was recovered while training.", tuple(charts), missing=missing)


def _speed(group: Group) -> Section:
    found = [one.suite("speed", Speeds) for one in group.members]
    machines = ", ".join(dict.fromkeys(speeds.machine for speeds in found if speeds is not None))
    table = tables.speeds(group)
    return Section(
        "Decode speed",
        "transformers' own forward pass, source and checkpoint in turns"
        + (f", on {machines}" if machines else "")
        + ". Ratios are of such turns; speeds of different runs depend on what else the machine did.",
        _charts(
            ("speed-ratio", "Decoding against the source", runs.decode_ratio(group)),
            ("speed", "Decoding speed", runs.decode_speed(group)),
        ),
        () if table is None else (table,),
        _lacking(group, _without(group, "speed", Speeds), "speed", "--suite speed"),
    )


def _charts(*drawn: "tuple[str, str, Figure | None]") -> tuple[Chart, ...]:
    return tuple(Chart(name, title, figure) for name, title, figure in drawn if figure is not None)


def _retrieved(group: Group) -> list[tuple[int, Found, Retrieval]]:
    return [
        (number, one, found)
        for number, one in enumerate(group.members)
        if (found := one.suite("retrieval", Retrieval))
    ]


def _grids(group: Group, kind: str) -> Iterable[tuple[float, ...]]:
    for _, _, found in _retrieved(group):
        for model in (found.student, found.teacher):
            yield from getattr(model, kind).accuracy if model is not None else ()


def _without(
    group: Group, name: str, kind: type[Perplexities | Fidelity | Caches | Retrieval | Speeds]
) -> list[Found]:
    return [one for one in group.members if one.suite(name, kind) is None]


def _lacking(group: Group, lacking: Iterable[Found], what: str, options: str) -> tuple[tuple[str, str], ...]:
    """What is not known, of whom, and the command that measures it: of the first, in a file of its own."""
    without = list(lacking)
    if not without:
        return ()
    every = len(without) == len(group.members)
    names = "not measured" if every else f"not measured of {', '.join(one.label for one in without)}"
    suite = options.rpartition("--suite ")[2].partition(" ")[0].replace(",", "-")
    return ((f"{what}: {names}", command(without[0].directory, options, f"eval-{suite}.json")),)
