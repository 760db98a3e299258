"""The names of methods, the default first, and the functions of those for GQA and MQA.

Only `subspace`, kvfold's own method, is refined, reads statistics and prepares for a quantised cache. Any
other is taken as published. For MLA, `subspace` is `latent.to_mla`, and the others are rows of `PEERS` in
published.py, which say whether they read statistics.
"""

from ...core.errors import InvalidInput
from ..algebra.target import GroupedTarget, LatentTarget, Rank
from . import pooling
from .published import PEERS, peer

OWN = "subspace"
POOLS: dict[str, pooling.Pool] = {
    OWN: pooling.subspace,
    "aligned": pooling.aligned,
    "aligned:grouped": pooling.aligned,  # after heads are put in another order
    "mean": pooling.mean,
}


def names(target: GroupedTarget | LatentTarget) -> tuple[str, ...]:
    """Return the names of the methods for a target, the default first."""
    return (OWN, *PEERS) if isinstance(target, LatentTarget) else tuple(POOLS)


def check(target: GroupedTarget | LatentTarget, method: str | None) -> str:
    """Return the method to use: the one named, or the target's default."""
    known = names(target)
    rule = peer(method) if method is not None and isinstance(target, LatentTarget) else None
    if method is not None and method not in known and rule is None:
        raise InvalidInput(f"--method {method} does not apply to this target; choose from {', '.join(known)}")
    if rule is not None and isinstance(target, LatentTarget) and target.q_lora_rank and not rule.queries:
        raise InvalidInput(
            f"--q-lora-rank does not apply to --method {method}, which is taken as published; leave it out"
        )
    return method or known[0]


def reads_statistics(method: str) -> bool:
    """Return whether a method makes use of statistics."""
    rule = peer(method)
    return method == OWN or (rule is not None and rule.needs_statistics)


def check_prepared(
    target: GroupedTarget | LatentTarget, method: str, cache_dtype: str, rank: Rank | None
) -> None:
    """Refuse `--cache-dtype` where nothing of a fold can be prepared for it."""
    if cache_dtype == "bfloat16":
        return
    if method != OWN:
        raise InvalidInput(
            f"--cache-dtype {cache_dtype} does not apply to --method {method}, which is taken as published; "
            "leave it out"
        )
    if rank == "full" or (isinstance(target, LatentTarget) and target.slots == "source"):
        raise InvalidInput(
            f"--cache-dtype {cache_dtype} does not apply where everything is kept, as a proof; leave it out, "
            "or give a smaller --rank or --kv-budget"
        )


def check_calibrated(
    method: str, target: GroupedTarget | LatentTarget, rotating: int, *, calibrated: bool, biased: bool
) -> None:
    """Refuse to fold without statistics what cannot be.

    `rotating` dimensions of a source's head rotate; `biased`: biases must go into weights.
    """
    if calibrated:
        return
    rule = peer(method)
    if rule is not None and rule.needs_statistics:
        raise InvalidInput(f"--method {method} needs statistics; use --calibration self, or a text")
    if biased:
        raise InvalidInput(
            "the source's biases can go into weights by statistics only; use --calibration self, or an "
            "engine that takes biases"
        )
    if isinstance(target, LatentTarget) and target.slots == "allocated":
        if target.qk_rope_head_dim > rotating:
            raise InvalidInput(
                f"--rope-dim {target.qk_rope_head_dim} does not fit: {rotating} dimensions of a head rotate, "
                "and only statistics can allocate more slots than that; use --calibration self, or at most "
                f"{rotating}"
            )
        raise InvalidInput(
            "--slots allocated needs statistics to allocate by; use --calibration self, or --slots uniform"
        )
