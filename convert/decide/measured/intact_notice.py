"""A notice for those who leave MLA's rotation open: what it would lose intact, measured on the same tokens.

Nothing positional is lost then, but keys are rebuilt at every step, and no engine but transformers runs it
with a smaller cache. So it stays the user's choice.
"""

from dataclasses import replace

from ....core.errors import InvalidInput
from ...algebra.target import LatentTarget
from ...families.support import LIMIT
from ..plan import Plan, make_plan
from .layer_losses import closed_form_loss


def measure_intact(plan: Plan, layers: int) -> float | None:
    """Measure the closed form with rotation left intact and a latent of as many numbers as are cached.

    Args:
        plan: with rotation decoupled.
        layers: at most so many are folded.

    Returns:
        Nats per token on held-back tokens; None where the source cannot have that form, the user has decided
        against it or against own code, or an engine must run it that saves no cache then. Sources with key
        norms have a choice of their own.
    """
    target, request = plan.target, plan.request
    is_decided = any(one is not None for one in (request.rope, request.rope_dim, request.slots))
    is_decided = is_decided or plan.source.family.k_norm is not None
    if is_decided or request.container == "stock" or not set(plan.engines) <= {"transformers"}:
        return None
    assert isinstance(target, LatentTarget), "only MLA has rotation to leave intact"
    cached = str(target.kv_lora_rank + target.qk_rope_head_dim)
    sizes = {"rope": "intact", "rank": cached, "kv_budget": None, "cache_dtype": "bfloat16"}
    try:
        intact = make_plan(plan.source, request.model_copy(update=sizes), plan.statistics)
    except InvalidInput:
        return None
    return closed_form_loss(replace(intact, losses=plan.losses), layers, "rotation intact")


def intact_notice(decoupled: float, intact: float | None) -> tuple[str, ...]:
    """Return a sentence where rotation left intact loses less by more than `LIMIT` nats.

    Args:
        decoupled: nats that the plan's closed form loses.
        intact: the same of the other form; None: it has none.
    """
    if intact is None or decoupled - intact <= LIMIT:
        return ()
    return (
        f"kvfold convert --rope intact loses less with the same budget: {intact:.4g} instead of "
        f"{decoupled:.4g} nats by the closed form on held-back calibration tokens; but its output brings its "
        "own code, one layer caches three more numbers per token, keys are rebuilt at every step, and vLLM "
        "saves no cache with it",
    )
