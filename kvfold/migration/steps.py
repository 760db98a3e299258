"""The steps of a migration: a proof, then one size after the other, to the smallest cache within a bound.

Every step folds the source itself and not the result of the step before. Latent attention has no heads that
could be folded again, and with heads there was nothing to gain: on the demo checkpoint (8 heads to 2, one
seed, 128 held-out windows) 100k tokens at half and 100k more at a quarter reached KL 0.153, 200k at a quarter
from the source 0.153, and 100k there 0.158.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..checkpoints.eval_json import read_report
from ..checkpoints.record import read_record, sha256
from ..convert.algebra.subspaces import decomposing
from ..convert.calibration.statistics import Statistics
from ..convert.calibration.study import study
from ..convert.decide.fold_cost import FoldCost, predict_cost
from ..convert.families.source import open_source
from ..convert.request import FoldRequest, fold_request
from ..convert.settle.settle import make_plan
from ..convert.write.rewrite import rewrite
from ..core.console import LOG, is_shown, notice
from ..core.errors import InvalidInput
from ..core.machine_rates import measure_rates
from ..core.work import WorkDir, claimed, discard_finished
from ..distill.run.job import distill
from ..engines.fresh_process import reason_of
from ..engines.verify import verify
from ..eval.assertions import Unmet, check
from ..eval.run import evaluate, reserved
from ..texts.calibration_name import names_statistics
from .outcome import arrive, check_places, find_report
from .request import Migration, Step, naming_options

# KL in nats that rounding in half precision explains; in float32 `verify` itself asks for less.
SAME = 1e-3
_ONCE = ("start", "text", "statistics")  # phases that all folds share
_ROLES = {"source": "teacher", "folded": "parent", "distilled": "student"}


def migrate(asked: Migration) -> dict[str, Any]:
    """Run a migration, or resume one that was stopped, possibly with another bound.

    Returns:
        The report, which is stored in the output's report.json: `met`, `out`, and the numbers of every step.

    Raises:
        InvalidInput: an output exists or cannot be written, or a part of the work refuses its input.
        Unmet: the fold that keeps everything differs from its source.
        core.signals.Interrupted: a signal stopped the training.
    """
    report = find_report(asked)
    if report is not None:
        notice(f"{asked.out} is already complete; removing the remains of its run in {asked.partial}")
        discard_finished(asked.out)
        return report
    check_places(asked)

    def keeps(work: WorkDir) -> bool:
        return any((asked.partial / name).is_dir() for name in ("folded", "distilled"))

    with claimed(asked.partial, "migration", keeps=keeps) as work:
        work.begin(asked.asked())
        identity = work.unit("identity", lambda: _identity(asked))
        found: list[dict[str, Any]] = []
        for number, step in enumerate(asked.steps, 1):
            _say(f"Step {number} of {len(asked.steps)}: {asked.wanted.to} {step.name}")
            found.append(_carry_out(asked, step, work))
            kept = found[-1]
            _say(
                f"Step {number} of {len(asked.steps)}: cache {kept['cache_ratio']:.1%}, perplexity "
                f"{kept['perplexity'][kept['kept']]:.4g} ({kept['perplexity_ratio']['mean']:.4f}x), KL "
                f"{kept['kl']['mean']:.4f}: {asked.bound.text} {'holds' if kept['met'] else 'does not hold'}"
            )
            if not found[-1]["met"]:
                break
        return arrive(asked, identity, found, work)


def _identity(asked: Migration) -> dict[str, Any]:
    """Prove the container: a fold that keeps everything has to equal the source.

    If there is no such fold, the result says why.
    """
    place = asked.partial / "identity"
    _say("Verify: a fold that keeps everything against the source")
    heads = open_source(asked.source).geometry.num_key_value_heads
    request = FoldRequest(model=asked.wanted.model, to="gqa", kv_heads=heads)
    if asked.wanted.to == "mla":
        request = FoldRequest(model=asked.wanted.model, to="mla", rank="full", dtype="float32")
    shutil.rmtree(place, ignore_errors=True)
    try:
        rewrite(make_plan(asked.source, request), place)
        seen = verify(place, source=asked.source)
    except InvalidInput as mistake:  # the steps' own numbers are still measured
        reason = reason_of(mistake)
        notice(f"a fold that keeps everything was not compared with the source: {reason}")
        found: dict[str, Any] = {"checked": False, "reason": reason}
    else:
        distance = seen.measured.get("kl")
        failures = seen.failures or (
            [] if distance is not None and distance <= SAME else [f"its KL to it is {distance}"]
        )
        if failures:
            raise Unmet(
                f"a fold that keeps everything differs from {asked.wanted.model}: {'; '.join(failures)}"
            )
        found = {"checked": True, "kl": distance, "max_logit_difference": seen.measured["max_difference"]}
    shutil.rmtree(place, ignore_errors=True)
    return found


def _carry_out(asked: Migration, step: Step, work: WorkDir) -> dict[str, Any]:
    """Fold, distil and evaluate one size, as far as that is not done; return the findings.

    If distillation made it worse, or may have by the bound's own measure, the fold is evaluated too, and the
    better one is used.
    """
    partial = asked.partial.resolve()  # as records spell places
    folded, distilled = (partial / name / step.name for name in ("folded", "distilled"))
    if not folded.exists():
        statistics = _statistics(asked, work)
        calibration = asked.calibration if statistics else {"calibration": "none"}
        request = _request(asked, step, calibration)
        with decomposing("the statistics"):
            plan = make_plan(asked.source, request, statistics)
        for sentence in plan.notices:
            notice(sentence)
        folded.parent.mkdir(exist_ok=True)
        rewrite(plan, folded)
    if not distilled.exists():
        broken = verify(folded, run=False).failures
        if broken:
            raise Unmet(f"the fold to {step.name} does not pass kvfold verify: {'; '.join(broken)}")
        recipe = asked.recipe.model_copy(update={"student": str(folded), "output": str(distilled)})
        with naming_options():
            distill(recipe)
    report = _evaluate(asked, distilled, folded)
    ppl = report["suites"]["ppl"]
    perplexity = {who: ppl[role]["perplexity"] for who, role in _ROLES.items()}
    best = _summary(asked, step, "distilled", perplexity, report)
    is_worse = perplexity["distilled"] > perplexity["folded"]
    if is_worse or not (best["met"] or "ppl" in asked.bound.path):
        fold = _summary(asked, step, "folded", perplexity, _evaluate(asked, folded, None))
        if (fold["met"], is_worse) > (best["met"], not is_worse):
            notice(
                f"distillation made {step.name} worse, so its fold is used; give more --tokens-per-step, or "
                "a lower rate with --set stages.0.lr=RATE"
            )
            return fold
    return best


def _evaluate(asked: Migration, checkpoint: Path, parent: Path | None) -> dict[str, Any]:
    file = checkpoint / "eval.json"
    if not file.exists():
        with reserved(file) as (journal, write):
            result = evaluate(checkpoint, asked.source, asked.text, asked.options, parent, journal=journal)
            write(result.to_text())
    return read_report(file, checkpoint).to_json()


def _request(asked: Migration, step: Step, calibration: Mapping[str, Any]) -> FoldRequest:
    return fold_request(
        {
            "model": asked.wanted.model,
            "to": asked.wanted.to,
            **step.sizes,
            **calibration,
            "effort": asked.wanted.effort,
            "refine": asked.refine,
        }
    )


def predict_folds(asked: Migration) -> FoldCost:
    """Return the predicted cost of the folds of all sizes on this machine; they share statistics."""
    rates = measure_rates(open_source(asked.source).geometry.hidden_size)
    seconds: dict[str, float] = {}
    peak = 0
    for step in asked.steps:
        request = _request(asked, step, asked.calibration)
        plan = replace(step.plan, request=request, refine=request.taken.steps, effort=request.taken)
        cost = predict_cost(plan, asked.calibration["calibration"], rates)
        for phase, found in cost.seconds.items():
            seconds[phase] = found if phase in _ONCE else seconds.get(phase, 0.0) + found
        peak = max(peak, cost.peak_bytes)
    return FoldCost(seconds=seconds, peak_bytes=peak)


def _statistics(asked: Migration, work: WorkDir) -> Statistics | None:
    kept = asked.partial / "statistics.safetensors"
    if kept.exists() and work.units.get("statistics") == sha256(kept):
        return Statistics.load(kept)
    if "statistics" in work.units:  # they have changed since
        kept.unlink(missing_ok=True)
    saved = names_statistics(asked.calibration["calibration"]) or asked.calibration["calibration"] == "none"
    found = study(
        open_source(asked.source), **asked.calibration, save=None if saved else kept, work=asked.partial
    )
    if not saved:
        work.add({"statistics": sha256(kept)})
    return found


def _summary(
    asked: Migration, step: Step, kept: str, perplexity: dict[str, float], report: dict[str, Any]
) -> dict[str, Any]:
    """Return the findings for a step with one of its checkpoints.

    `evaluation` is the whole report of `kvfold eval`.
    """
    record, ppl = read_record(asked.partial / kept / step.name), report["suites"]["ppl"]
    assert record is not None, "every step has a record"
    try:
        check([asked.bound], report)
        met = True
    except Unmet:
        met = False
    return {
        "step": step.name,
        "met": met,
        "kept": kept,
        "target": record["target"],
        "cache_ratio": report["suites"]["cache"]["ratio"],
        "predicted_loss": record["predicted_loss"],
        "perplexity": perplexity,
        "perplexity_ratio": ppl["ratio"],
        "kl": report["suites"]["fidelity"]["kl"],
        "recovered_share": (ppl["recovered_share"] or {}).get("value"),
        "evaluation": report,
    }


def _say(text: str) -> None:
    """Report a step: on stderr inside the command, otherwise to the log."""
    if is_shown():
        click.echo(text, err=True)
    else:
        LOG.info(text)
