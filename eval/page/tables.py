"""The tables of a page: cells with the text to show and the value to sort by."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...checkpoints.cost_blocks import CacheBlock, ModelCache, Quartiles, SpeedBlock, SpeedCell
from ...checkpoints.quality_blocks import (
    Estimate,
    NeedleMap,
    PerplexityBlock,
    RetrievalBlock,
    RulerBlock,
    TasksBlock,
)
from ...checkpoints.record import is_distilled
from .groups import Group
from .records import Found


@dataclass(frozen=True)
class TableCell:
    """A cell.

    Attributes:
        text: the text to show; an empty text is shown as a dash.
        value: the value to sort by; None (unknown) is sorted last.
    """

    text: str = ""
    value: float | str | None = None


@dataclass(frozen=True)
class Table:
    """A table: its caption, its columns, and its rows, whose first cells name them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]

    def is_numeric(self, column: int) -> bool:
        """Return whether a column holds a number."""
        return any(isinstance(row[column].value, int | float) for row in self.rows)


_OVERVIEW = (
    "checkpoint",
    "folded to",
    "cache",
    "perplexity",
    "ratio to source",
    "KL, nats",
    "same top-1",
    "recovered",
)


def overview(group: Group) -> Table:
    """Return the main numbers of every checkpoint, one line each."""
    rows = [_overview_row(one, is_source=one is group.itself) for one in group.everyone]
    source = next(
        (found.teacher for _, _, found in group.measured("ppl", PerplexityBlock) if found.teacher), None
    )
    if source is not None and group.itself is None and group.source is not None:
        known = (
            _words(f"{group.source.name} (source)"),
            TableCell(),
            _number(1.0, "100%"),
            _number(source.perplexity),
        )
        rest = [TableCell()] * (len(_OVERVIEW) - len(known))
        rows.insert(0, (*known, *rest))
    return Table("All checkpoints", _OVERVIEW, tuple(rows))


def _overview_row(one: Found, is_source: bool) -> tuple[TableCell, ...]:
    ppl = one.report.block("ppl", PerplexityBlock)
    fidelity = one.report.fidelity
    ratio = None if is_source else one.cache_ratio
    return (
        _words(one.label),
        _words(target(one)),
        _number(ratio, f"{ratio:.2%}" if ratio is not None else ""),
        _number(ppl.student.perplexity if ppl else None),
        _estimate(ppl.ratio if ppl else None),
        _estimate(fidelity.kl if fidelity else None),
        _estimate(fidelity.same_top1 if fidelity else None),
        _recovered(ppl),
    )


def _recovered(ppl: PerplexityBlock | None) -> TableCell:
    if ppl is None:
        return TableCell()
    value = ppl.recovered_share.value
    if value is not None:
        return TableCell(f"{value:.1%}", value)
    return TableCell("undefined" if ppl.parent else "")


def target(one: Found) -> str:
    """Return the target that a checkpoint was folded to, in words."""
    found = one.target
    name = str(found.get("name", "")).upper()
    sizes = {"kv_lora_rank": "rank", "qk_rope_head_dim": "rotary", "num_key_value_heads": "heads"}
    words = ", ".join(f"{word} {found[key]}" for key, word in sizes.items() if found.get(key))
    stage = ", distilled" if is_distilled(one.record or {}) else ""
    if "scheme" in one.rounded:
        stage += f", weights in {one.rounded['scheme'].upper()}"
    if one.report.cache_dtype is not None:
        stage += f", cache in {one.report.cache_dtype}"
    return f"{name} ({words}){stage}" if words else (name + stage).removeprefix(", ")


def caches(group: Group) -> Table | None:
    """Return the cache of the source and of every checkpoint; None where no cache was measured."""
    members = group.measured("cache", CacheBlock)
    if not members:
        return None
    source = next((found.teacher for _, _, found in members if found.teacher), None)
    models = [("source", source)] if source else []
    models += [(one.label, found.student) for _, one, found in members]
    lengths = sorted({context.tokens for _, model in models for context in model.contexts})
    memory = next((found.memory for _, _, found in members if found.memory), None)
    columns = ["checkpoint", "elements / token / layer", "by config.json", "dtype"]
    columns += [f"{length // 1024}k tokens" for length in lengths]
    if memory:
        columns += [f"sequences of {length // 1024}k in {_size(memory)}" for length in lengths]
    rows = [_cache_row(name, model, lengths, with_batches=bool(memory)) for name, model in models]
    return Table("KV cache as measured in the running models", tuple(columns), tuple(rows))


def _cache_row(
    name: str, model: ModelCache, lengths: Sequence[int], with_batches: bool
) -> tuple[TableCell, ...]:
    contexts = {context.tokens: context for context in model.contexts}
    expected = model.predicted_elements_per_token_per_layer
    cells = [
        _words(name),
        _number(model.elements_per_token_per_layer, f"{model.elements_per_token_per_layer:,.6g}"),
        _number(expected, "" if expected is None else f"{expected:,.6g}"),
        _words(model.stored_dtype),
    ]
    for length in lengths:
        size = contexts[length].bytes if length in contexts else None
        cells.append(_number(size, _size(size)))
    for length in lengths if with_batches else ():
        cells.append(_count(contexts[length].largest_batch if length in contexts else None))
    return tuple(cells)


def speeds(group: Group) -> Table | None:
    """Return every cell of the sweeps, with quartiles; None where no speed was measured."""
    columns = (
        "checkpoint",
        "batch",
        "context",
        "prefill, tokens/s",
        "decode, tokens/s",
        "decode, ms per step",
        "prefill speed relative to the source",
        "decode speed relative to the source",
        "peak MB above weights",
    )
    rows = []
    for one in group.everyone:
        found = one.report.block("speed", SpeedBlock)
        for cell in found.cells if found else ():
            rows.append((_words(one.label), _count(cell.batch), _count(cell.context), *_speed_cells(cell)))
    return Table("Speed: median [quartiles]", columns, tuple(rows)) if rows else None


def _speed_cells(cell: SpeedCell) -> tuple[TableCell, ...]:
    speed = cell.student
    if speed is None:
        return (_words(f"skipped: {cell.skipped}"), *[TableCell()] * 5)
    return (
        _quartiles(speed.prefill.tokens_per_second),
        _quartiles(speed.decode.tokens_per_second),
        _quartiles(speed.decode.milliseconds),
        _quartiles(cell.prefill_speedup),
        _quartiles(cell.decode_speedup),
        _number(speed.peak_bytes / 1e6, f"{speed.peak_bytes / 1e6:,.1f}"),
    )


def retrieval(group: Group) -> Table | None:
    """Return the needles found over all lengths and depths; None where none were searched for."""
    columns = (
        "checkpoint",
        "needle",
        "found, digit by digit",
        "right key likeliest",
        "source: found",
        "source: likeliest",
    )
    rows = []
    for one in group.everyone:
        found = one.report.block("retrieval", RetrievalBlock)
        for kind, own in found.student.items() if found else ():
            theirs = found.teacher.get(kind) if found and found.teacher else None
            rows.append((_words(one.label), _words(kind), *_needle_cells(own), *_needle_cells(theirs)))
    return Table("Needles found", columns, tuple(rows)) if rows else None


def _needle_cells(found: NeedleMap | None) -> tuple[TableCell, TableCell]:
    if found is None:
        return TableCell(), TableCell()
    return _percent(_mean(found.accuracy)), _percent(_mean(found.choice))


def ruler(group: Group) -> Table | None:
    """Return the scores of RULER's tasks by length; None where none were measured."""
    columns = ("checkpoint", "task", "tokens", "score", "source")
    rows = []
    for one in group.everyone:
        found = one.report.block("ruler", RulerBlock)
        for task in found.tasks if found else ():
            assert found is not None
            for number, length in enumerate(found.lengths):
                theirs = found.teacher.accuracy[task][number] if found.teacher else None
                cells = (_percent(found.student.accuracy[task][number]), _percent(theirs))
                rows.append((_words(one.label), _words(task), _count(length), *cells))
    return Table("RULER", columns, tuple(rows)) if rows else None


def tasks(group: Group) -> Table | None:
    """Return the primary metric of every task; None where no task was run."""
    columns = (
        "checkpoint",
        "task",
        "metric",
        "score",
        "source",
        "difference",
        "right → wrong",
        "wrong → right",
        "McNemar p",
    )
    rows = []
    for one in group.everyone:
        found = one.report.block("tasks", TasksBlock)
        for name, task in found.tasks.items() if found else ():
            metric = task.metrics[task.primary]
            cells = [_estimate(value) for value in (metric.student, metric.teacher, metric.difference)]
            flips = metric.flips
            if flips is None:
                cells += [TableCell()] * 3
            else:
                cells += [_count(flips.right_to_wrong), _count(flips.wrong_to_right), _number(flips.p_value)]
            rows.append((_words(one.label), _words(name), _words(task.primary), *cells))
    return Table("Benchmark tasks", columns, tuple(rows)) if rows else None


def _words(text: str) -> TableCell:
    return TableCell(text, text or None)


def _number(value: float | None, text: str | None = None) -> TableCell:
    if value is None:
        return TableCell()
    return TableCell(f"{value:.4g}" if text is None else text, value)


def _count(value: float | None) -> TableCell:
    return TableCell() if value is None else TableCell(f"{value:,}", value)


def _percent(value: float | None) -> TableCell:
    return TableCell() if value is None else TableCell(f"{value:.0%}", value)


def _estimate(value: Estimate | None) -> TableCell:
    if value is None:
        return TableCell()
    error = "" if value.standard_error is None else f" ± {value.standard_error:.2g}"
    return TableCell(f"{value.mean:.4g}{error}", value.mean)


def _quartiles(value: Quartiles | None) -> TableCell:
    return TableCell() if value is None else TableCell(str(value), value.median)


def _mean(grid: Sequence[Sequence[float]]) -> float:
    values = [value for row in grid for value in row]
    return sum(values) / len(values)


def _size(size: int | None) -> str:
    if size is None:
        return ""
    for unit, power in (("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size / 1000:.3g} kB"
