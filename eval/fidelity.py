"""How close a student's predictions are to its teacher's, token by token.

Shapes: C tokens of a chunk, V vocabulary, N windows, T scored tokens of a window.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from .perplexity import Estimate, estimate


@dataclass(frozen=True)
class Fidelity:
    """Student against teacher on the same tokens.

    Attributes:
        kl: KL(teacher || student), mean over tokens, nats.
        kl_median: median of the tokens' KL, nats.
        kl_p99: 99th percentile of the tokens' KL, nats.
        same_top1: share of tokens at which both find the same next token most probable.
    """

    kl: Estimate
    kl_median: float
    kl_p99: float
    same_top1: Estimate


def common_vocabulary(ours_CV: Tensor, theirs_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Two sets of log probabilities over the entries both have; what is cut off is padding, no token of the text.

    Each is normalised over what is left of it.
    """
    width = min(ours_CV.shape[-1], theirs_CV.shape[-1])
    ours, theirs = (logp if logp.shape[-1] == width else logp[:, :width].log_softmax(-1) for logp in (ours_CV, theirs_CV))
    return ours, theirs


def token_kl(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """KL(teacher || student) of each token (C,), nats, from log probabilities."""
    return (teacher_CV.exp() * (teacher_CV - student_CV)).sum(-1)


def summarise(kl_NT: Tensor, same_NT: Tensor) -> Fidelity:
    """The report from every token's KL (nats) and agreement (0 or 1), both float64."""
    ordered = kl_NT.flatten().sort().values
    return Fidelity(
        kl=estimate(kl_NT.mean(1).tolist()),
        kl_median=_quantile(ordered, 0.5),
        kl_p99=_quantile(ordered, 0.99),
        same_top1=estimate(same_NT.mean(1).tolist()),
    )


def _quantile(ordered: Tensor, share: float) -> float:
    """The nearest-rank quantile (torch.quantile refuses more than 16 M values)."""
    return float(ordered[math.ceil(share * len(ordered)) - 1])
