"""The suite `ppl`: perplexity of each model, difference of student and teacher, recovered share of the loss.

A loss here is the negative log likelihood (NLL) of scored tokens in nats.
"""

import math
from collections.abc import Sequence

from ...checkpoints.quality_blocks import ModelPerplexity, PerplexityBlock, RecoveredLoss
from ...checkpoints.record import is_distilled, read_record
from ..estimate import estimate, paired_difference, transformed
from ..scores import Scores
from ..subject import Subject
from ..windows import TextWindows


def rows(found: PerplexityBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    models: list[ModelPerplexity] = [getattr(found, role) for role in roles]
    lines = [
        ["perplexity", *(f"{model.perplexity:.4g}" for model in models)],
        ["NLL, nats/token", *(str(model.nll) for model in models)],
        ["bits per byte", *(f"{model.bits_per_byte:.4f}" for model in models)],
    ]
    if found.student.word_perplexity is not None:
        lines.append(["word perplexity", *(f"{model.word_perplexity:.4g}" for model in models)])
    if found.difference is None or found.ratio is None:
        return lines
    low, high = found.difference.low, found.difference.high
    interval = "" if low is None else f" [{low:.4f}, {high:.4f}]"
    lines.append(["NLL - teacher's [95 %]", f"{found.difference}{interval}"])
    lines.append(["perplexity / teacher's", str(found.ratio)])
    return [*lines, ["recovered share", str(found.recovered_share)]]


def measure(subject: Subject) -> PerplexityBlock:
    """Score the windows with every model."""
    scores, windows = subject.scores, subject.windows
    models = {role: _measured(scores, role, windows, subject.dtype(role)) for role in subject.roles}
    student, teacher, parent = (models.get(role) for role in ("student", "teacher", "parent"))
    assert student is not None
    counts = scores.counts
    no_parent = "no folded parent"
    if is_distilled(read_record(subject.paths["student"]) or {}):
        no_parent = "the fold is not where kvfold.json says"
    difference = paired_difference(student.window_nll, teacher.window_nll, counts) if teacher else None
    return PerplexityBlock(
        student=student,
        teacher=teacher,
        parent=parent,
        difference=difference,
        ratio=transformed(difference, _exp, _exp(difference.mean)) if difference else None,
        recovered_share=recovered_share(
            student.window_nll,
            teacher.window_nll if teacher else None,
            parent.window_nll if parent else None,
            counts,
            no_parent=no_parent,
        ),
        window_tokens=tuple(map(int, counts)),
    )


def recovered_share(
    student: Sequence[float],
    teacher: Sequence[float] | None,
    parent: Sequence[float] | None,
    weights: Sequence[float] | None = None,
    *,
    no_parent: str = "no folded parent",
) -> RecoveredLoss:
    """Return how much of a conversion's loss its distillation recovered.

    The share is (ln PPL₀ - ln PPL) / (ln PPL₀ - ln PPL_teacher), where PPL₀ is the folded parent's
    perplexity.

    Args:
        student: window NLLs of the distilled checkpoint.
        teacher: window NLLs of its source, if that was measured.
        parent: window NLLs of the folded checkpoint that it started from, if that was measured.
        weights: scored tokens of each window; None: the same for all.
        no_parent: the reason to give where `parent` is None.

    Returns:
        The share. It is undefined where a model is missing, and where the conversion's loss is at most two
        standard errors of the paired difference, since the quotient would be noise.
    """
    if teacher is None or parent is None:
        return RecoveredLoss(None, "no teacher" if teacher is None else no_parent)
    lost = paired_difference(parent, teacher, weights)
    if lost.standard_error is None:
        return RecoveredLoss(None, "a single window has no standard error")
    if lost.mean <= 2 * lost.standard_error:
        return RecoveredLoss(
            None, f"the fold lost {lost.mean:.2g} nats, within noise (2 SE = {2 * lost.standard_error:.2g})"
        )
    return RecoveredLoss(paired_difference(parent, student, weights).mean / lost.mean, None)


def _measured(scores: Scores, role: str, windows: TextWindows, dtype: str) -> ModelPerplexity:
    nll_S = scores.nll[role]
    window_nll = scores.by_window(nll_S)
    nll = estimate(window_nll, scores.counts)
    whole = float(nll_S.sum())
    bits = whole / math.log(2) / windows.bytes
    words = None if windows.original is None else windows.original.words
    return ModelPerplexity(
        dtype=dtype,
        perplexity=_exp(nll.mean),
        nll=nll,
        bits_per_byte=bits,
        byte_perplexity=_exp(bits * math.log(2)),
        word_perplexity=None if words is None else _exp(whole / words),
        window_nll=tuple(window_nll),
    )


def _exp(exponent: float) -> float:
    """Return exp of a number, capped at 1e304, since JSON has no infinity."""
    return math.exp(min(exponent, 700.0))
