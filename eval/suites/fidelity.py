"""The suite `fidelity`: distance of a student's predictions from its teacher's, token by token.

The measures are those of llama.cpp's `perplexity --kl-divergence`, so that numbers can be compared;
their errors are taken over windows, not over tokens.

Legend: S scored tokens of all windows, N windows, R resamples, Q percentiles.
"""

import math

import numpy as np
from torch import Tensor

from ...checkpoints.quality_blocks import Estimate, FidelityBlock, PositionBucket
from ..estimate import Array, estimate, resampled, transformed
from ..scores import Scores
from ..subject import Subject

KL_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
DELTA_P_PERCENTILES = (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)


def rows(found: FidelityBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    correlation = "undefined" if found.nll_correlation is None else str(found.nll_correlation)
    told = {
        "median": "p50",
        "90th percentile": "p90",
        "99th percentile": "p99",
        "99.9th percentile": "p99_9",
    }
    lines = [
        ("KL(teacher || student), nats", str(found.kl)),
        *((f"KL {name}", short(found.kl_percentiles[key])) for name, key in told.items()),
        ("KL maximum", f"{found.kl_max:.4g}"),
        ("same top-1", str(found.same_top1)),
        ("Δp of the next token, RMS", str(found.delta_p_rms)),
        ("correlation of log probabilities", correlation),
    ]
    return [[label, value] for label, value in lines]


def measure(subject: Subject) -> FidelityBlock | None:
    """Compare the student with its teacher; None where there is none."""
    return summarise(subject.scores) if "teacher" in subject.roles else None


def summarise(scores: Scores) -> FidelityBlock:
    """Return the block from the KL, the agreement and both losses at every token."""
    assert scores.kl_S is not None
    assert scores.same_S is not None
    counts = scores.counts
    delta_S = (-scores.nll["student"]).exp() - (-scores.nll["teacher"]).exp()
    square = estimate(scores.by_window(delta_S**2), counts)
    rms = math.sqrt(square.mean)
    return FidelityBlock(
        kl=estimate(scores.by_window(scores.kl_S), counts),
        kl_percentiles=_percentiles(scores, scores.kl_S, KL_PERCENTILES),
        kl_max=float(scores.kl_S.max()),
        same_top1=estimate(scores.by_window(scores.same_S), counts),
        delta_p=estimate(scores.by_window(delta_S), counts),
        delta_p_rms=transformed(square, lambda value: math.sqrt(max(value, 0.0)), 0.5 / rms if rms else 0.0),
        delta_p_percentiles=_percentiles(scores, delta_S, DELTA_P_PERCENTILES),
        nll_correlation=_correlation(scores),
        kl_by_position=_by_position(scores),
    )


def _percentiles(scores: Scores, value_S: Tensor, percentiles: tuple[float, ...]) -> dict[str, Estimate]:
    """Return percentiles over tokens, interpolated as by numpy, with errors by resampling whole windows."""
    value_S, order_S = value_S.sort()
    sorted_S, window_S = value_S.numpy(), scores.window_S[order_S].numpy()
    fraction_Q = np.array(percentiles) / 100

    def at(count_N: Array) -> Array:
        # A window that is drawn k times has each of its tokens k times, so ranks are cumulative sums of k.
        rank_S = count_N[window_S].cumsum()
        place_Q = fraction_Q * (rank_S[-1] - 1)
        below_Q, above_Q = (
            sorted_S[rank_S.searchsorted(np_round(place_Q), side="right")] for np_round in (np.floor, np.ceil)
        )
        found: Array = below_Q + (above_Q - below_Q) * (place_Q - np.floor(place_Q))
        return found

    estimates = resampled(
        lambda count_RN: np.stack([at(count_N) for count_N in count_RN], axis=-1), len(scores.counts)
    )
    return {
        f"p{percentile:g}".replace(".", "_"): found
        for percentile, found in zip(percentiles, estimates, strict=True)
    }


def _correlation(scores: Scores) -> Estimate | None:
    """Return Pearson's correlation over tokens, with errors by resampling windows; None where undefined."""
    ours_S, theirs_S = (nll_S - nll_S.mean() for nll_S in (scores.nll["student"], scores.nll["teacher"]))
    if not (ours_S**2).sum() or not (theirs_S**2).sum():
        return None
    count_N = np.array(scores.counts)
    products = (ours_S, theirs_S, ours_S**2, theirs_S**2, ours_S * theirs_S)
    sum_5N = np.array([scores.by_window(product) for product in products]) * count_N

    def pearson(drawn_RN: Array) -> Array:
        total_R = drawn_RN @ count_N
        x_R, y_R, xx_R, yy_R, xy_R = (drawn_RN @ sum_5N.T).T / total_R
        found: Array = ((xy_R - x_R * y_R) / np.sqrt((xx_R - x_R**2) * (yy_R - y_R**2)))[None]
        return found

    return resampled(pearson, len(count_N))[0]


def _by_position(scores: Scores) -> tuple[PositionBucket, ...]:
    """Return the mean KL of the tokens at positions between powers of two."""
    assert scores.kl_S is not None
    buckets = []
    longest = int(scores.position_S.max())
    for power in range(longest.bit_length()):
        first, last = 2**power, min(2 ** (power + 1) - 1, longest)
        inside_S = (scores.position_S >= first) & (scores.position_S <= last)
        if not inside_S.any():
            continue
        window_S = scores.window_S[inside_S].unique(return_inverse=True)[1]
        part = Scores(window_S, scores.position_S[inside_S], {}, scores.kl_S[inside_S], None)
        assert part.kl_S is not None
        buckets.append(PositionBucket(first, last, estimate(part.by_window(part.kl_S), part.counts)))
    return tuple(buckets)


def short(value: Estimate) -> str:
    """Return an estimate with four digits that are not leading zeros."""
    return f"{value.mean:.4g}" + ("" if value.standard_error is None else f" ± {value.standard_error:.2g}")
