"""What a student's distribution over the next token costs, with the gradient in closed form.

Where one model has more logits than the other, the rest is padding that no text has: distributions are
compared over what both have, each normalised over that; cross entropy to the text is over all that a model
has.

Every criterion maps a `Pair` of distributions to the cost summed over tokens, in nats, and its gradient with
respect to those of the student's logits that it reads, divided by the temperature. Everything is computed
from log probabilities: where both probabilities underflow to zero, their ratio is still right.

Shapes: C tokens of a chunk, V vocabulary.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

Cost = tuple[Tensor, Tensor]  # summed over tokens; gradient (C, V), which the caller may overwrite


class Pair:
    """Student q and teacher p over one chunk of tokens; each quantity is made when first asked for, and kept.

    Args:
        student_CV: logits; not changed.
        teacher_CV: logits, or None where no criterion reads the teacher.
        labels_C: the next tokens of the text.
    """

    def __init__(self, student_CV: Tensor, teacher_CV: Tensor | None, labels_C: Tensor) -> None:
        width = min(logits_CV.shape[-1] for logits_CV in (student_CV, teacher_CV) if logits_CV is not None)
        self.log_q_CV = torch.log_softmax(student_CV[:, :width], -1)
        self._log_p_CV = None if teacher_CV is None else torch.log_softmax(teacher_CV[:, :width], -1)
        self._student_CV, self._teacher_CV = student_CV, teacher_CV
        self.labels_C1 = labels_C[:, None]

    @property
    def log_p_CV(self) -> Tensor:
        assert self._log_p_CV is not None, "the loss compares the student with a teacher, and there is none"
        return self._log_p_CV

    @cached_property
    def whole_log_q_CV(self) -> Tensor:
        """log q over all logits of the student."""
        is_cut = self._student_CV.shape[-1] > self.log_q_CV.shape[-1]
        return torch.log_softmax(self._student_CV, -1) if is_cut else self.log_q_CV

    @cached_property
    def q_CV(self) -> Tensor:
        return self.log_q_CV.exp()

    @cached_property
    def p_CV(self) -> Tensor:
        return self.log_p_CV.exp()

    @cached_property
    def gap_CV(self) -> Tensor:
        """log p - log q."""
        return self.log_p_CV - self.log_q_CV

    @cached_property
    def forward_kl(self) -> Tensor:
        """KL(p || q), summed over tokens."""
        return (self.p_CV * self.gap_CV).sum()

    def teacher_ce(self) -> Tensor:
        """Cross entropy of the teacher to the text, over all its logits, summed over tokens."""
        log_p_CV = self.log_p_CV
        if self._teacher_CV is not None and self._teacher_CV.shape[-1] > log_p_CV.shape[-1]:
            log_p_CV = torch.log_softmax(self._teacher_CV, -1)
        return -log_p_CV.gather(1, self.labels_C1).sum()

    def same_top1(self) -> Tensor:
        """At how many tokens both find the same next one most probable."""
        return (self.log_q_CV.argmax(-1) == self.log_p_CV.argmax(-1)).sum()


def kl(pair: Pair, beta: float) -> Cost:
    """Forward: KL(p || q), whose gradient is q - p."""
    return pair.forward_kl, pair.q_CV - pair.p_CV


def reverse_kl(pair: Pair, beta: float) -> Cost:
    """KL(q || p), whose gradient is q (log q - log p - KL)."""
    negative_C1 = (pair.q_CV * pair.gap_CV).sum(-1, keepdim=True)
    return -negative_C1.sum(), (negative_C1 - pair.gap_CV).mul_(pair.q_CV)


def jsd(pair: Pair, beta: float) -> Cost:
    """β KL(p || m) + (1 - β) KL(q || m) with m = β p + (1 - β) q, whose gradient is (1 - β) q (log q - log m
    - KL(q || m)).

    The generalised Jensen-Shannon divergence of Agarwal et al., "On-policy distillation of language models",
    arXiv 2306.13649. It vanishes as β nears 0 or 1, where JSD/β tends to the forward and JSD/(1 - β) to the
    reverse KL divergence; exactly at 0 and 1 the name stands for those limits, as in TRL.

    log m is formed as the larger of log p and log q plus log1p(w expm1(-|log p - log q|)), w the weight of
    the smaller: no probability is formed on the way, nothing overflows, and for p = q it is log p to the last
    bit.
    """
    if beta in (0.0, 1.0):
        return (kl if beta == 0 else reverse_kl)(pair, beta)
    gap_CV = pair.gap_CV
    # w: 1 - β where p is the larger, else β (torch.where of two numbers takes ten times as long).
    weight_CV = (gap_CV > 0).to(gap_CV.dtype).mul_(1 - 2 * beta).add_(beta)
    above_CV = weight_CV.mul_(gap_CV.abs().neg_().expm1_()).log1p_()  # log m - max(log p, log q)
    from_p_CV = above_CV - gap_CV.clamp(max=0)  # log m - log p
    from_q_CV = above_CV.add_(gap_CV.clamp(min=0))  # log m - log q
    of_q_C1 = (pair.q_CV * from_q_CV).sum(-1, keepdim=True)  # -KL(q || m)
    value = -beta * (pair.p_CV * from_p_CV).sum() - (1 - beta) * of_q_C1.sum()
    return value, (of_q_C1 - from_q_CV).mul_(pair.q_CV).mul_(1 - beta)


def ce(pair: Pair, beta: float) -> Cost:
    """Cross entropy to the next token of the text, whose gradient is q - 1 at that token and q elsewhere."""
    log_q_CV = pair.whole_log_q_CV
    q_CV = pair.q_CV if log_q_CV is pair.log_q_CV else log_q_CV.exp()
    minus_C1 = torch.full_like(pair.labels_C1, -1, dtype=log_q_CV.dtype)
    return -log_q_CV.gather(1, pair.labels_C1).sum(), q_CV.scatter_add(1, pair.labels_C1, minus_C1)


CRITERIA: dict[str, Callable[[Pair, float], Cost]] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "ce": ce,
}
