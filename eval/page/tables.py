"""The tables of a page: cells with what is shown and what is sorted by."""

from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import Caches, Estimate, Fidelity, Perplexities, Retrieval, Speeds, Spread, Tasks
from .groups import Group
from .records import Found


@dataclass(frozen=True)
class Cell:
    """A cell; `value` sorts it, None (nothing is known) goes last. An empty text is shown as a dash."""

    text: str = ""
    value: float | str | None = None


@dataclass(frozen=True)
class Table:
    """A table: its caption, its columns and its rows, the first cell of which names them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def is_numeric(self, column: int) -> bool:
        """Whether there is a number in a column."""
        return any(isinstance(row[column].value, int | float) for row in self.rows)


def overview(group: Group) -> Table:
    """Everything in one line a checkpoint."""
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
    rows: list[tuple[Cell, ...]] = []
    for one in group.everyone:
        ppl, fidelity = one.suite("ppl", Perplexities), one.suite("fidelity", Fidelity)
        share = None if one is group.itself else one.share
        recovered = ppl.recovered_share.value if ppl else None
        cells = (
            _name(one),
            _words(target(one)),
            _number(share, f"{share:.2%}" if share is not None else ""),
            _number(ppl.student.perplexity if ppl else None),
            _estimate(ppl.ratio if ppl else None),
            _estimate(fidelity.kl if fidelity else None),
            _estimate(fidelity.same_top1 if fidelity else None),
            _number(recovered, f"{recovered:.1%}")
            if recovered is not None
            else Cell("undefined" if ppl and ppl.parent else ""),
        )
        rows.append(cells)
    source = next(
        (ppl.teacher for one in group.members if (ppl := one.suite("ppl", Perplexities)) and ppl.teacher),
        None,
    )
    if source is not None and group.itself is None and group.source is not None:
        rest = [Cell()] * (len(columns) - 4)
        rows.insert(
            0,
            (
                _words(f"{group.source.name} (source)"),
                Cell(),
                _number(1.0, "100%"),
                _number(source.perplexity),
                *rest,
            ),
        )
    return Table("All checkpoints", columns, tuple(rows))


def target(one: Found) -> str:
    """What a checkpoint was folded to, in words."""
    found = one.target
    name = str(found.get("name", "")).upper()
    sizes = {"kv_lora_rank": "rank", "qk_rope_head_dim": "rotary", "num_key_value_heads": "heads"}
    words = ", ".join(f"{word} {found[key]}" for key, word in sizes.items() if found.get(key))
    stage = ", distilled" if (one.record or {}).get("stage") == "distill" else ""
    return f"{name} ({words}){stage}" if words else name + stage


def caches(group: Group) -> Table | None:
    """What sequences cost, of the source and of every checkpoint."""
    members = [(one, found) for one in group.members if (found := one.suite("cache", Caches))]
    if not members:
        return None
    source = next((found.teacher for _, found in members if found.teacher), None)
    models = [("source", source)] if source else []
    models += [(one.label, found.student) for one, found in members]
    lengths = sorted({context.tokens for _, model in models for context in model.contexts})
    memory = next((found.memory for _, found in members if found.memory), None)
    columns = ["checkpoint", "elements / token / layer", "by config.json", "dtype"]
    columns += [f"{length // 1024}k tokens" for length in lengths]
    columns += [f"sequences of {length // 1024}k in {_size(memory)}" for length in lengths if memory]
    rows = []
    for name, model in models:
        contexts = {context.tokens: context for context in model.contexts}
        cells = [
            _words(name),
            _number(model.elements_per_token_per_layer, f"{model.elements_per_token_per_layer:,.6g}"),
            _count(model.predicted_elements_per_token_per_layer),
            _words(model.stored_dtype),
        ]
        sizes = [contexts[length].bytes if length in contexts else None for length in lengths]
        cells += [_number(size, _size(size)) for size in sizes]
        if memory:
            cells += [
                _count(contexts[length].largest_batch if length in contexts else None) for length in lengths
            ]
        rows.append(tuple(cells))
    return Table("KV cache as measured in the running models", tuple(columns), tuple(rows))


def speeds(group: Group) -> Table | None:
    """Every cell of the sweeps, with quartiles, paired with the source round by round."""
    columns = (
        "checkpoint",
        "batch",
        "context",
        "prefill, tokens/s",
        "decode, tokens/s",
        "decode, ms a step",
        "prefill, times the source's speed",
        "decode, times the source's speed",
        "peak MB above weights",
    )
    rows = []
    for one in group.everyone:
        found = one.suite("speed", Speeds)
        for cell in found.cells if found else ():
            timing = cell.student
            numbers = (
                (
                    _spread(timing.prefill.tokens_per_second),
                    _spread(timing.decode.tokens_per_second),
                    _spread(timing.decode.milliseconds),
                    _spread(cell.prefill_speedup),
                    _spread(cell.decode_speedup),
                    _number(timing.peak_bytes / 1e6, f"{timing.peak_bytes / 1e6:,.1f}"),
                )
                if timing
                else (_words(f"skipped: {cell.skipped}"), *[Cell()] * 5)
            )
            rows.append((_name(one), _count(cell.batch), _count(cell.context), *numbers))
    return Table("Speed: median [quartiles]", columns, tuple(rows)) if rows else None


def retrieval(group: Group) -> Table | None:
    """Needles found over all lengths and depths."""
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
        found = one.suite("retrieval", Retrieval)
        for kind in ("passkey", "multikey") if found else ():
            assert found is not None
            own, theirs = getattr(found.student, kind), getattr(found.teacher, kind, None)
            scores = [
                _share(model and _mean(getattr(model, score)))
                for model in (own, theirs)
                for score in ("accuracy", "choice")
            ]
            rows.append((_name(one), _words(kind), *scores))
    return Table("Needles found", columns, tuple(rows)) if rows else None


def tasks(group: Group) -> Table | None:
    """Every task's primary metric."""
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
        found = one.suite("tasks", Tasks)
        for name, task in found.tasks.items() if found else ():
            metric = task.metrics[task.primary]
            flips = metric.flips
            cells = [_estimate(value) for value in (metric.student, metric.teacher, metric.difference)]
            cells += (
                [_count(flips.right_to_wrong), _count(flips.wrong_to_right), _number(flips.p_value)]
                if flips
                else [Cell()] * 3
            )
            rows.append((_name(one), _words(name), _words(task.primary), *cells))
    return Table("Benchmark tasks", columns, tuple(rows)) if rows else None


def _name(one: Found) -> Cell:
    return _words(one.label)


def _words(text: str) -> Cell:
    return Cell(text, text or None)


def _number(value: float | None, text: str | None = None) -> Cell:
    return Cell() if value is None else Cell(f"{value:.4g}" if text is None else text, value)


def _count(value: int | None) -> Cell:
    return Cell() if value is None else Cell(f"{value:,}", value)


def _share(value: float | None) -> Cell:
    return Cell() if value is None else Cell(f"{value:.0%}", value)


def _estimate(value: Estimate | None) -> Cell:
    if value is None:
        return Cell()
    error = "" if value.standard_error is None else f" ± {value.standard_error:.2g}"
    return Cell(f"{value.mean:.4g}{error}", value.mean)


def _spread(value: Spread | None) -> Cell:
    return (
        Cell()
        if value is None
        else Cell(f"{value.median:,.4g} [{value.q1:,.4g}, {value.q3:,.4g}]", value.median)
    )


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
