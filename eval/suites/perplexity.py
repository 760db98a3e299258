"""The suite `ppl`: what each model makes of the text, the student's difference from its teacher, the share
recovered.

Where it speaks of a loss it is the negative log likelihood (NLL) of scored tokens in nats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..estimate import Estimate, estimate, paired_difference, transformed
from ..scores import Scores
from ..subject import Subject
from ..windows import Windows


@dataclass(frozen=True)
class Share:
    """A part of a loss that was won back.

    Attributes:
        value: 1 is all of it, 0 nothing, negative worse than before; None when it is undefined.
        reason: why it is undefined; None when it is not.
    """

    value: float | None
    reason: str | None

    def __str__(self) -> str:
        return f"undefined: {self.reason}" if self.value is None else f"{self.value:.1%}"


@dataclass(frozen=True)
class Measured:
    """One model.

    Attributes:
        dtype: of its weights as loaded.
        perplexity: exp of the mean NLL of a scored token.
        nll: that mean, nats.
        bits_per_byte: the whole NLL in bits, divided by the bytes of UTF-8 that the scored tokens stand for,
            or by those that the protocol counts.
        byte_perplexity: 2 to that power.
        word_perplexity: exp of the whole NLL divided by words, where the protocol counts them.
        window_nll: the mean NLL in each window, nats.
    """

    dtype: str
    perplexity: float
    nll: Estimate
    bits_per_byte: float
    byte_perplexity: float
    word_perplexity: float | None
    window_nll: tuple[float, ...]


@dataclass(frozen=True)
class Perplexity:
    """What the suite found.

    Attributes:
        student: the model in question.
        teacher: its source, if there is one.
        parent: the converted checkpoint that it was distilled from, if there is one.
        difference: NLL of student - teacher, paired by window, nats a token.
        ratio: perplexity of student / teacher, paired by window.
        recovered_share: how much of the conversion's loss the distillation won back.
        window_tokens: scored tokens of each window.
    """

    student: Measured
    teacher: Measured | None
    parent: Measured | None
    difference: Estimate | None
    ratio: Estimate | None
    recovered_share: Share
    window_tokens: tuple[int, ...]

    def rows(self, roles: tuple[str, ...]) -> list[list[str]]:
        """Lines of the table."""
        models: list[Measured] = [getattr(self, role) for role in roles]
        blank = [""] * (len(roles) - 1)
        rows = [
            ["perplexity", *(f"{model.perplexity:.4g}" for model in models)],
            ["NLL, nats/token", *(str(model.nll) for model in models)],
            ["bits per byte", *(f"{model.bits_per_byte:.4f}" for model in models)],
        ]
        if self.student.word_perplexity is not None:
            rows.append(["word perplexity", *(f"{model.word_perplexity:.4g}" for model in models)])
        if self.difference is None or self.ratio is None:
            return rows
        low, high = self.difference.low, self.difference.high
        interval = "" if low is None else f" [{low:.4f}, {high:.4f}]"
        rows.append(["NLL - teacher's [95 %]", f"{self.difference}{interval}", *blank])
        rows.append(["perplexity / teacher's", str(self.ratio), *blank])
        return [*rows, ["recovered share", str(self.recovered_share), *blank]]


def measure(subject: Subject) -> Perplexity:
    """Score the windows with every model."""
    scores, windows = subject.scores, subject.windows
    models = {role: _measured(scores, role, windows, subject.dtype(role)) for role in subject.roles}
    student, teacher, parent = (models.get(role) for role in ("student", "teacher", "parent"))
    assert student is not None
    counts = scores.counts
    difference = paired_difference(student.window_nll, teacher.window_nll, counts) if teacher else None
    return Perplexity(
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
        ),
        window_tokens=tuple(map(int, counts)),
    )


def recovered_share(
    student: Sequence[float],
    teacher: Sequence[float] | None,
    parent: Sequence[float] | None,
    weights: Sequence[float] | None = None,
) -> Share:
    """How much of what a conversion lost its distillation won back: (ln PPL₀ - ln PPL) / (ln PPL₀ - ln
    PPL_teacher).

    Args:
        student: window NLLs of the distilled checkpoint.
        teacher: of its source, if that was measured.
        parent: of the converted checkpoint it started from (PPL₀), if that was measured.
        weights: scored tokens of each window; None: all alike.

    Returns:
        The share; undefined when a model is missing or when the conversion's loss is not more than two
        standard errors of the paired difference, where the quotient would be noise.
    """
    if teacher is None or parent is None:
        return Share(None, "no teacher" if teacher is None else "no folded parent")
    lost = paired_difference(parent, teacher, weights)
    if lost.standard_error is None:
        return Share(None, "a single window has no standard error")
    if lost.mean <= 2 * lost.standard_error:
        return Share(
            None, f"the fold lost {lost.mean:.2g} nats, within noise (2 SE = {2 * lost.standard_error:.2g})"
        )
    return Share(paired_difference(parent, student, weights).mean / lost.mean, None)


def _measured(scores: Scores, role: str, windows: Windows, dtype: str) -> Measured:
    nll_S = scores.nll[role]
    window_nll = scores.by_window(nll_S)
    nll = estimate(window_nll, scores.counts)
    whole = float(nll_S.sum())
    bits = whole / math.log(2) / windows.bytes
    words = None if windows.original is None else windows.original.words
    return Measured(
        dtype=dtype,
        perplexity=_exp(nll.mean),
        nll=nll,
        bits_per_byte=bits,
        byte_perplexity=_exp(bits * math.log(2)),
        word_perplexity=None if words is None else _exp(whole / words),
        window_nll=tuple(window_nll),
    )


def _exp(exponent: float) -> float:
    """Perplexities beyond 1e304 are told as that: JSON has no infinity."""
    return math.exp(min(exponent, 700.0))
