"""Criteria on a student's distribution over the next token, with their gradients in closed form.

If one model has more logits than the other, the rest is padding that no text uses. Distributions are compared
over the logits that both have, each normalised over them; cross entropy to the text is over all logits of a
model.

Every criterion maps a `Pair` of distributions to the cost summed over tokens, in nats, and to its gradient
with respect to the student's logits that it reads, divided by the temperature. Everything is computed from
log probabilities: if both probabilities underflow to zero, their ratio is still right.

Shapes: C tokens of a chunk, V vocabulary.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ..recipe.recipe import LossName

Cost = tuple[Tensor, Tensor]  # summed over tokens; gradient (C, V), which the caller may overwrite


class Pair:
    """Student q and teacher p over one chunk of tokens. Each quantity is computed on first use, and kept.

    Args:
        student_CV: logits; not changed.
        teacher_CV: logits, or None if no criterion reads the teacher.
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
        """The teacher's log p over the logits that both have."""
        assert self._log_p_CV is not None, "the loss compares the student with a teacher, and there is none"
        return self._log_p_CV

    @cached_property
    def whole_log_q_CV(self) -> Tensor:
        """The student's log q over all its logits."""
        is_cut = self._student_CV.shape[-1] > self.log_q_CV.shape[-1]
        return torch.log_softmax(self._student_CV, -1) if is_cut else self.log_q_CV

    @cached_property
    def q_CV(self) -> Tensor:
        """The probabilities q."""
        return self.log_q_CV.exp()

    @cached_property
    def p_CV(self) -> Tensor:
        """The probabilities p."""
        return self.log_p_CV.exp()

    @cached_property
    def gap_CV(self) -> Tensor:
        """The difference log p - log q."""
        return self.log_p_CV - self.log_q_CV

    @cached_property
    def forward_kl(self) -> Tensor:
        """The divergence KL(p || q), summed over tokens."""
        return (self.p_CV * self.gap_CV).sum()

    def teacher_ce(self) -> Tensor:
        """Return the cross entropy of the teacher to the text, over all its logits, summed over tokens."""
        log_p_CV = self.log_p_CV
        if self._teacher_CV is not None and self._teacher_CV.shape[-1] > log_p_CV.shape[-1]:
            log_p_CV = torch.log_softmax(self._teacher_CV, -1)
        return -log_p_CV.gather(1, self.labels_C1).sum()

    def same_top1(self) -> Tensor:
        """Return the number of tokens at which both find the same next token most probable."""
        return (self.log_q_CV.argmax(-1) == self.log_p_CV.argmax(-1)).sum()


def kl(pair: Pair, beta: float) -> Cost:
    """Return forward KL, KL(p || q), and its gradient q - p."""
    return pair.forward_kl, pair.q_CV - pair.p_CV


def reverse_kl(pair: Pair, beta: float) -> Cost:
    """Return KL(q || p), and its gradient q (log q - log p - KL)."""
    negative_C1 = (pair.q_CV * pair.gap_CV).sum(-1, keepdim=True)
    return -negative_C1.sum(), (negative_C1 - pair.gap_CV).mul_(pair.q_CV)


def jsd(pair: Pair, beta: float) -> Cost:
    """Return β KL(p || m) + (1 - β) KL(q || m) with m = β p + (1 - β) q.

    Its gradient is (1 - β) q (log q - log m - KL(q || m)). It is the generalised Jensen-Shannon divergence of
    Agarwal et al., "On-policy distillation of language models", arXiv 2306.13649. It vanishes as β nears 0 or
    1, where JSD/β tends to the forward and JSD/(1 - β) to the reverse KL divergence; exactly at 0 and 1 the
    name stands for those limits, as in TRL.

    log m is the larger of log p and log q plus log1p(w expm1(-|log p - log q|)), w the weight of the smaller.
    No probability is formed on the way, nothing overflows, and for p = q the result is log p to the last bit.
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
    """Return the cross entropy to the text's next token; its gradient is q - 1 at that token, q elsewhere."""
    log_q_CV = pair.whole_log_q_CV
    q_CV = pair.q_CV if log_q_CV is pair.log_q_CV else log_q_CV.exp()
    minus_C1 = torch.full_like(pair.labels_C1, -1, dtype=log_q_CV.dtype)
    return -log_q_CV.gather(1, pair.labels_C1).sum(), q_CV.scatter_add(1, pair.labels_C1, minus_C1)


# A stage computes these by `mix`, all over one set of logits, and the losses of layers.py by `Objective`.
CRITERIA: dict[LossName, Callable[[Pair, float], Cost]] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "ce": ce,
}
