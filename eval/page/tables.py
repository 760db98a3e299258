"""The tables of a page: cells with the text to show and the value to sort by."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...checkpoints.cost_blocks import CacheBlock, Quartiles, SpeedBlock
from ...checkpoints.quality_blocks import (
    Estimate,
    GenerationBlock,
    NeedleMap,
    PerplexityBlock,
    RetrievalBlock,
    RulerBlock,
    TasksBlock,
)
from ...checkpoints.record import is_distilled
from ...core.units import show_bytes
from .groups import Group
from .records import Found


class TableCell(NamedTuple):
    """A cell.

    Attributes:
        text: the text to show; an empty text is shown as a dash.
        value: the value to sort by; None (unknown) is sorted last.
    """

    text: str = ""
    value: float | str | None = None


class Table(NamedTuple):
    """A table: its caption, its columns, and its rows, whose first cells name them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]

    def is_numeric(self, column: int) -> bool:
        """Return whether a column holds a number."""
        return any(isinstance(row[column].value, int | float) for row in self.rows)


def _cell(value: Any, form: str = "") -> TableCell:
    """Return a cell of a text, a number in a format, or an estimate; an empty one without a value."""
    if value is None or value == "":
        return TableCell()
    if isinstance(value, Estimate):
        error = "" if value.standard_error is None else f" ± {value.standard_error:.2g}"
        return TableCell(f"{value.mean:.4g}{error}", value.mean)
    if isinstance(value, Quartiles):
        return TableCell(str(value), value.median)
    return TableCell(f"{value:{form}}", value)


def _row(*values: Any) -> tuple[TableCell, ...]:
    return tuple(value if isinstance(value, TableCell) else _cell(value) for value in values)


def overview(group: Group) -> Table:
    """Return the main numbers of every checkpoint, one line each."""
    columns = (
        "checkpoint",
        "folded to",
        "cache",
        "perplexity",
        "ratio to source",
        "KL, nats",
        "same top-1",
        "recovered",
    )
    rows = [_overview_row(one, is_source=one is group.itself) for one in group.everyone]
    source = next(
        (found.teacher for _, _, found in group.measured("ppl", PerplexityBlock) if found.teacher), None
    )
    if source is not None and group.itself is None and group.source is not None:
        known = _row(
            f"{group.source.name} (source)", None, TableCell("100%", 1.0), _cell(source.perplexity, ".4g")
        )
        rows.insert(0, (*known, *[TableCell()] * (len(columns) - len(known))))
    return Table("All checkpoints", columns, tuple(rows))


def _overview_row(one: Found, is_source: bool) -> tuple[TableCell, ...]:
    ppl = one.report.block("ppl", PerplexityBlock)
    fidelity = one.report.fidelity
    recovered = _cell(ppl.recovered_share.value if ppl else None, ".1%")
    if ppl and ppl.parent and not recovered.text:
        recovered = TableCell("undefined")
    return _row(
        one.label,
        target(one),
        _cell(None if is_source else one.cache_ratio, ".2%"),
        _cell(ppl.student.perplexity if ppl else None, ".4g"),
        ppl.ratio if ppl else None,
        fidelity.kl if fidelity else None,
        fidelity.same_top1 if fidelity else None,
        recovered,
    )


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
        columns += [f"sequences of {length // 1024}k in {show_bytes(memory)}" for length in lengths]
    rows = []
    for name, model in models:
        contexts = {context.tokens: context for context in model.contexts}
        known = [contexts.get(length) for length in lengths]
        row = [
            _cell(name),
            _cell(model.elements_per_token_per_layer, ",.6g"),
            _cell(model.predicted_elements_per_token_per_layer, ",.6g"),
            _cell(model.stored_dtype),
            *(TableCell(show_bytes(one.bytes), one.bytes) if one else TableCell() for one in known),
        ]
        if memory:
            row += [_cell(one.largest_batch if one else None, ",") for one in known]
        rows.append(tuple(row))
    return Table("KV cache as measured in the running models", tuple(columns), tuple(rows))


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
            speed = cell.student
            values: tuple[Any, ...] = (f"skipped: {cell.skipped}", *[None] * 5)
            if speed is not None:
                values = (
                    speed.prefill.tokens_per_second,
                    speed.decode.tokens_per_second,
                    speed.decode.milliseconds,
                    cell.prefill_speedup,
                    cell.decode_speedup,
                    _cell(speed.peak_bytes / 1e6, ",.1f"),
                )
            rows.append(_row(one.label, _cell(cell.batch, ","), _cell(cell.context, ","), *values))
    return Table("Speed: median [quartiles]", columns, tuple(rows)) if rows else None


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
            rows.append((_cell(one.label), _cell(kind), *_needle_cells(own), *_needle_cells(theirs)))
    return Table("Needles found", columns, tuple(rows)) if rows else None


def _needle_cells(found: NeedleMap | None) -> tuple[TableCell, TableCell]:
    if found is None:
        return TableCell(), TableCell()
    return _cell(_mean(found.accuracy), ".0%"), _cell(_mean(found.choice), ".0%")


def _mean(grid: Sequence[Sequence[float]]) -> float:
    values = [value for row in grid for value in row]
    return sum(values) / len(values)


def ruler(group: Group) -> Table | None:
    """Return the scores of RULER's tasks by length; None where none were measured."""
    rows = []
    for one in group.everyone:
        found = one.report.block("ruler", RulerBlock)
        for task in found.tasks if found else ():
            assert found is not None
            for number, length in enumerate(found.lengths):
                models = (found.student, found.teacher)
                scores = (_cell(model.accuracy[task][number] if model else None, ".0%") for model in models)
                rows.append(_row(one.label, task, _cell(length, ","), *scores))
    return Table("RULER", ("checkpoint", "task", "tokens", "score", "source"), tuple(rows)) if rows else None


def generation(group: Group) -> Table | None:
    """Return what checkpoints write, next to their source; None where nothing was written."""
    columns = (
        "checkpoint",
        "answers right",
        "source's",
        "difference",
        "do not end",
        "length / source's",
        "runs repeated",
        "KL on its own text",
        "KL on the source's",
    )
    rows = []
    for _, one, found in group.measured("generation", GenerationBlock):
        source, apart = found.teacher, found.difference
        own = (found.student.right, source.right if source else None, apart.right if apart else None)
        length = apart.length if apart else None
        kls = (apart.kl_own_text, apart.kl_teacher_text) if apart else (None, None)
        rows.append(_row(one.label, *own, found.student.endless, length, found.student.repeated, *kls))
    return Table("What is written", columns, tuple(rows)) if rows else None


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
            flips: tuple[Any, ...] = (None, None, None)
            if metric.flips is not None:
                turned = metric.flips
                counts = (turned.right_to_wrong, turned.wrong_to_right)
                flips = (*(_cell(count, ",") for count in counts), _cell(turned.p_value, ".4g"))
            values = (metric.student, metric.teacher, metric.difference)
            rows.append(_row(one.label, name, task.primary, *values, *flips))
    return Table("Benchmark tasks", columns, tuple(rows)) if rows else None
