"""`kvfold.plan`: the targets that a source could be folded to, ranked, and the one to take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..convert.calibration.statistics import Statistics
from ..convert.calibration.study import read_saved, study
from ..convert.calibration.text_length import at_context
from ..convert.decide.fold_cost import cost_by_default, in_words
from ..convert.decide.per_rank import Ranks, source_elements
from ..convert.families.source import Source, open_source
from ..convert.formats.serving_widths import PROFILES
from ..convert.request import FoldRequest
from ..convert.towers.tower import tower_of
from ..convert.towers.tower_targets import tower_report
from ..convert.towers.view import tower_source
from ..convert.towers.whole_checkpoint import other_specs
from ..core.cache_dtypes import CacheDtype, cache_dtype
from ..core.console import notice
from ..core.disk import check_outside
from ..core.errors import InvalidInput
from ..core.grid import Grid, Tabular
from ..core.hub import resolve
from ..core.units import read_share, show_bytes
from ..engines.rules.output_kinds import takes_any_width
from .candidates import SHARES, Candidate, Surroundings, find_candidates, plan_source
from .demand import Bounds
from .loss_curve import SHARES as CURVE_SHARES
from .loss_curve import check_picture, draw, points_of
from .prediction import source_loss
from .ranking import Row, alternative, compare, place, place_all, predict_rows, rank, what_would_fit
from .request import PlanRequest

__all__ = ["Candidates", "PlanRequest", "recommend"]

_CONTEXT = 32 * 1024  # tokens of a sequence where the user names no number and the source has as many
_COLUMNS = (
    "", "cache", "", "parameters", "memory", "fits", "", "bytes per token", "attention FLOPs", "engines",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Candidates(Tabular):
    """The targets of a source that fit, the best first.

    Attributes:
        report: all that was found, as `kvfold plan --json` prints it; it also has what does not fit.
        bounds: the memory, context and batch that they were held against.
    """

    report: dict[str, Any]
    bounds: Bounds

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The candidates that fit: label, command, cache, memory in bytes, predicted loss, engines."""
        return [row for row in self.report["candidates"] if row["fits"]]

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The label, command and reason of the candidate to take; None where none fits."""
        return self.report["chosen"]  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def grid(self, *, every: bool = False) -> Grid:
        """Return the candidates that fit, or all, as a table with the source in its last line."""
        report = self.report
        shown, count = report["candidates"] if every else self.rows, len(report["candidates"])
        limit = "any memory" if report["memory"] is None else show_bytes(report["memory"])
        title = (
            f"{report['source']} ({report['family']}) at {report['context']:,} tokens x {report['batch']} "
            f"in {limit}"
        )
        if self.bounds.ranks.tensor > 1:
            title += f", TP {report['tp']}" + (f" with DCP {report['dcp']}" if report["dcp"] > 1 else "")
        if len(self) < count:
            title += f": {len(self)} of {count} targets fit"
        rows = [_cells(row) for row in shown]
        rows += [_cells({**row, "engines": {}}) for row in report["source_stored"]]
        if report["unchanged"] is not None:
            source = {"label": "(the source)", "predicted_loss": 0.0, "engines": {}}
            rows.append(_cells({**report["unchanged"], **source}))
        columns = [self.loss_heading if index == 6 else name for index, name in enumerate(_COLUMNS)]
        if self.report["cache_dtypes"]:
            columns[1] = "cache bytes"
        if self.bounds.ranks.tensor > 1:
            columns.append("elements per rank")
            own = [*report["source_stored"], *([report["unchanged"]] if report["unchanged"] else [])]
            of_rank = [row["rank"]["elements_per_token_per_layer"] for row in (*shown, *own)]
            rows = [[*cells, str(held)] for cells, held in zip(rows, of_rank, strict=True)]
        return Grid(title, tuple(columns), rows)

    @property
    def loss_heading(self) -> str:
        """The heading of the column of predicted losses."""
        return "nats lost, --refine 0" if self.report["calibration"] else "error, by weights"

    @property
    def advice(self) -> str:
        """Sentences about the candidate to take and its command, or about what would fit."""
        chosen = self.chosen
        if chosen is not None:
            found = f"{chosen['label']}: {chosen['reason']}\n{chosen['command']}\n{in_words(chosen['fold'])}"
            other = chosen["alternative"]
            return found + (f"\nOr {other['label']}: {other['reason']}\n{other['command']}" if other else "")
        found, bounds = self.report["would_fit"], self.bounds
        ways = [f"--memory {-(-found['memory'] // 10**6)}MB ({found['label']})"]
        if found["context"]:
            ways.append(
                f"--context {found['context']} at a batch of {bounds.batch} ({found['context_label']})"
            )
        if found["batch"]:
            ways.append(f"--batch {found['batch']} at {bounds.context:,} tokens ({found['batch_label']})")
        return f"Nothing fits. What would: {' or '.join(ways)}"


def _cells(row: dict[str, Any]) -> list[str]:
    cache, decode = row["cache"], row["decode"]
    loss = "" if row["predicted_loss"] is None else f"{row['predicted_loss']:.4f}"
    return [
        row["label"] + (" *" if row.get("front") else ""),
        f"{cache.get('bytes_share', cache.get('share', 1.0)):.1%}",
        show_bytes(row["memory"]["cache"]),
        f"{row['parameters'] / 1e6:,.4g} M",
        show_bytes(row["memory"]["total"]),
        "yes" if row["fits"] else "no",
        loss,
        f"{show_bytes(decode['bytes'])} {decode['form']}",
        f"{decode['attention_flops']:.3g}",
        ", ".join(name for name, reason in row["engines"].items() if not reason),
    ]


def recommend(request: PlanRequest) -> Candidates:
    """Return the targets of a source, ranked. Nothing is written but the statistics and picture asked for.

    Raises:
        InvalidInput: the source cannot be folded to a smaller cache, or a value of the request is unusable.
    """
    if request.png is not None:
        check_picture(request.png)
    directory = resolve(request.model, request.revision)
    check_outside({"--save-statistics": request.save_statistics, "--png": request.png}, [directory])
    tower = tower_of(directory, request.model, text_only=request.text_only)
    if tower is None:
        return _recommend(open_source(directory), request)
    with tower_source(tower) as source:
        inside = None if request.text_only else Surroundings(tower, other_specs(tower))
        found = _recommend(source, request, inside)
        around = tower_report(tower, in_place=not request.text_only)
        return replace(found, report={**found.report, "source": str(directory), "tower": around})


def _recommend(source: Source, request: PlanRequest, inside: Surroundings | None = None) -> Candidates:
    """Return the targets of a source that is open, ranked; `inside` is that of `Candidate`."""
    wants_curve = request.curve or request.png is not None
    kinds = tuple(cache_dtype(name) for name in dict.fromkeys(request.cache_dtypes))
    for share in request.budgets or ():
        read_share(share, "--budgets")
    shares = request.budgets or (CURVE_SHARES if wants_curve else SHARES)
    if source.family.unlike:
        raise InvalidInput(
            f"kvfold plan compares layers of one size, and those of {source.family.label} differ; "
            "`kvfold convert --to gqa --kv-heads N --dry-run` shows the cache of one target by kind of layer"
        )
    ranks = Ranks(tensor=request.tp, context=request.dcp)
    ranks.check(source.geometry)
    takes_all = request.engines and all(takes_any_width(one, everywhere=False) for one in request.engines)
    if not takes_all and not source.family.latent:
        _tell_small(source)
    candidates, refused = find_candidates(source, shares, request.engines, inside=inside)
    if not candidates:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in refused.items())
        raise InvalidInput(
            f"there is no target with a smaller cache for this source: "
            f"{reasons or 'it has one key/value head'}"
        )
    context = request.context or min(_CONTEXT, source.positions)
    bounds = Bounds(context=context, batch=request.batch, memory=request.memory, ranks=ranks)
    rows = place_all(candidates, kinds, bounds, request.engines)
    statistics = None
    if wants_curve or request.save_statistics is not None or any(row.fits for row in rows):
        names = ("sequences", "length", "seed", "layerwise")
        how: dict[str, Any] = {name: getattr(request, name) for name in names}
        taken = study(source, request.calibration, save=request.save_statistics, **how)
        statistics = at_context(source, taken, None)  # once, and not for the plan of each candidate
    else:
        read_saved(source, request.calibration, None)  # a wrong name is one also where nothing fits
    rows = predict_rows(rows, bounds, statistics, every=wants_curve)
    ranked, reason = rank(rows, request.goal, request.tolerance, calibrated=statistics is not None)
    unchanged = plan_source(source, inside)
    report = _report(source, ranked, reason, bounds, request, statistics, unchanged)
    report["refused"] = refused
    report["cache_dtypes"] = [kind.name for kind in kinds]
    report["source_stored"] = _stored(unchanged, bounds, kinds, statistics)
    if kinds:
        _mark_front([*report["candidates"], *report["source_stored"]])
        _tell_source(report)
    if wants_curve:
        report["curve"] = points = points_of(rows)
        if request.png is not None:
            if not points:
                raise InvalidInput(
                    f"--png {request.png}: no loss of this source's attention can be predicted, so there "
                    f"is nothing to draw"
                )
            name = Path(request.model).name or request.model
            draw(points, statistics is not None, f"predicted loss of {name}", request.png)
    if request.context is not None and request.context > source.positions:
        notice(
            f"--context {request.context} exceeds the source's max_position_embeddings, {source.positions}"
        )
    if request.calibration == "none":
        notice(
            "losses are predicted from the weights alone; --calibration self or saved statistics rank far "
            "better"
        )
    _tell_ranks(source, rows, ranks)
    return Candidates(report, bounds)


def _command(row: Row, request: PlanRequest) -> str:
    """Return the `kvfold convert` command of a row, calibrated as here where statistics were taken."""
    candidate = row.candidate
    update: dict[str, Any] = {
        "cache_dtype": row.asked.request.cache_dtype,
        "model": request.model,
        "revision": request.revision,
        "method": candidate.plan.method,
        "refine": None,
        "text_only": request.text_only,
    }
    if request.save_statistics is not None:
        update["calibration"] = str(request.save_statistics)
    elif request.calibration != "none":
        taken = {name: getattr(request, name) for name in ("calibration", "sequences", "length", "seed")}
        update.update(taken)
    asked: FoldRequest = candidate.request.model_copy(update=update)
    return asked.command


def _report(
    source: Source,
    rows: Sequence[Row],
    reason: str | None,
    bounds: Bounds,
    request: PlanRequest,
    statistics: Statistics | None,
    unchanged: Candidate | None,
) -> dict[str, Any]:
    own = None
    if unchanged is not None:
        whole = place(unchanged, bounds).to_dict()
        own = {key: whole[key] for key in ("cache", "rank", "parameters", "memory", "fits", "decode")}
    unit, calibration = "share of attention's output, by weights alone", None
    if statistics is not None:
        unit = "nats per token, before refinement"
        calibration = {"text": statistics.calibration, "tokens": statistics.tokens}
    said = None
    if reason is not None:
        chosen, other = rows[0], alternative(rows)
        said = {
            "label": chosen.name,
            "reason": reason,
            "command": _command(chosen, request),
            "fold": cost_by_default(chosen.asked, request.sequences).to_dict(),
            "alternative": None,
        }
        if other is not None:
            words = compare(chosen, other)
            said["alternative"] = {
                "label": other.name, "reason": words, "command": _command(other, request)
            }  # fmt: skip
    return {
        "source": str(source.checkpoint.directory),
        "family": source.family.label,
        "context": bounds.context,
        "batch": bounds.batch,
        "memory": bounds.memory,
        "tp": bounds.ranks.tensor,
        "dcp": bounds.ranks.context,
        "goal": request.goal,
        "unit": unit,
        "calibration": calibration,
        "unchanged": own,
        "candidates": [{**row.to_dict(), "command": _command(row, request)} for row in rows],
        "refused": {},
        "chosen": said,
        "would_fit": None if said else what_would_fit(rows, bounds),
    }


def _stored(
    unchanged: Candidate | None, bounds: Bounds, kinds: Sequence[CacheDtype], statistics: Statistics | None
) -> list[dict[str, Any]]:
    """Return the source itself with its cache in each format, as rows of the report."""
    if unchanged is None:
        return []
    own = unchanged if statistics is None else unchanged.with_statistics(statistics)
    rows = []
    for kind in kinds:
        row = replace(place(own, bounds, kind), loss=source_loss(own.plan, kind))
        rows.append({**row.to_dict(), "label": f"(the source, {kind.name})"})
    return rows


def _mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Mark in each row whether no other loses less in as few bytes of cache, or as little in fewer."""

    def place_of(row: dict[str, Any]) -> tuple[float, float]:
        return row["cache"]["bytes_per_token"], row["predicted_loss"]

    known = [row for row in rows if row["predicted_loss"] is not None]
    for row in rows:
        row["front"] = row in known and not any(
            all(theirs <= ours for theirs, ours in zip(place_of(other), place_of(row), strict=True))
            and place_of(other) != place_of(row)
            for other in known
        )


def _tell_source(report: dict[str, Any]) -> None:
    """Say that the source itself fits in a format and is predicted to lose less than what is chosen."""
    chosen = report["candidates"][0] if report["chosen"] else None
    fitting = [row for row in report["source_stored"] if row["fits"] and row["predicted_loss"] is not None]
    best = min(fitting, key=lambda row: row["predicted_loss"], default=None)
    if chosen and best and best["predicted_loss"] < (chosen["predicted_loss"] or 0.0):
        notice(
            f"the source itself fits with its cache in {best['cache']['dtype']}, and is predicted to lose "
            f"less than {chosen['label']}"
        )


def _tell_small(source: Source) -> None:
    """Say that a source's cache is too small for latent attention in engines that serve."""
    size = source.geometry.cache_elements
    too_wide = [profile for profile in PROFILES if profile.cached >= size]
    if too_wide:
        words = " and ".join(f"{profile} ({profile.cached})" for profile in too_wide)
        which = "MLA for serving" if len(too_wide) == len(PROFILES) else f"MLA at {words}"
        sizes = " or ".join(str(profile.cached) for profile in PROFILES)
        notice(
            f"{which} saves nothing here: the source caches {size} elements per token and layer, and the "
            f"latents that vLLM and SGLang serve take {sizes}"
        )


def _tell_ranks(source: Source, rows: Sequence[Row], ranks: Ranks) -> None:
    """Name the targets that do not make the cache of one rank smaller than the source's."""
    if ranks.tensor == 1:
        return
    own = source_elements(source.geometry, ranks)
    wider = [row for row in rows if not row.saves]
    if not wider:
        return
    heads = source.geometry.num_key_value_heads
    latents = sorted({row.held for row in wider if row.candidate.kind != "gqa"})
    held = f"; of latents {latents[0]} to {latents[-1]}, since every rank repeats them" if latents else ""
    notice(
        f"at TP {ranks.tensor} with DCP {ranks.context} a rank holds {own} elements per token and layer of "
        f"the source (GQA-{heads}){held}: {len(wider)} of the {len(rows)} targets save nothing there, and "
        f"GQA is the better one; --dcp, up to --tp, divides a latent's tokens"
    )
