"""The choice of MLA's rotary width, measured on tokens that no fit has seen.

A plan's prediction adds what the slots lose of the rotation to what the latent drops. It does not know that
queries are fitted to what is left, which makes good more of the first than of the second, and how much more
depends on the model. So neighbours of the width that is predicted to lose least are folded and measured.

Rotation that is left intact is measured on the same tokens, for a notice. Nothing positional is lost then,
but keys are rebuilt at every step, and no engine but transformers runs it with a smaller cache. So it stays
the user's choice.
"""

from dataclasses import replace

from ...core.console import is_first
from ...core.errors import InvalidInput
from ...core.processes import from_first, together
from ..algebra.target import LatentTarget
from ..decide.draft import make_draft
from ..decide.form import CHOSEN
from ..decide.plan import Draft, Plan
from ..families.support import LIMIT
from .losses import closed_form_loss, slots_loss


def settle_width(draft: Draft) -> Plan:
    """Return the plan with its rotary width chosen, and a notice where intact rotation loses far less.

    Every process of a distributed run gets what the first one measured.
    """
    plan = draft.plan
    assert isinstance(plan.target, LatentTarget), "only MLA has a rotary width"
    with together():
        found = measure_widths(draft) if is_first() else None
        intact = measure_intact(plan) if found else None
    found, intact = from_first((found, intact))
    if not found:
        return plan
    planned = plan.target.qk_rope_head_dim
    width = min(found, key=lambda each: found[each])
    told: tuple[str, ...] = ()
    if intact is not None and found[width] - intact > LIMIT:
        told = (
            f"kvfold convert --rope intact loses less with the same budget: {intact:.4g} instead of "
            f"{found[width]:.4g} nats by the closed form on held-back calibration tokens; but its output "
            "brings its own code, one layer caches three more numbers per token, keys are rebuilt at every "
            "step, and vLLM saves no cache with it",
        )
    if width == planned:
        return replace(plan, notices=(*plan.notices, *told))
    request = plan.request.model_copy(update={"rope_dim": width})
    settled = make_draft(plan.source, request, plan.statistics).plan
    # A width leaves these alone.
    form = [sentence for sentence in plan.notices if sentence.startswith(CHOSEN)]
    reason = (
        f"the rotary width is {width}: {planned} is predicted to lose less, but the closed form loses "
        f"{found[planned]:.4g} nats with {planned} and {found[width]:.4g} with {width} on held-back "
        "calibration tokens"
    )
    return replace(settled, request=plan.request, notices=(*form, *settled.notices, reason, *told))


def measure_widths(draft: Draft) -> dict[int, float]:
    """Measure a draft's closed form at its rotary width, and on from there while neighbours lose less.

    Returns:
        Losses on held-back tokens by width, in nats per token; empty where `forward.attend` does not compute
        the attention.
    """
    plan = draft.plan
    assert isinstance(plan.target, LatentTarget), "only MLA has a rotary width"

    def lost(width: int) -> float | None:
        division = draft.widths[width]
        tried = replace(plan, target=division.target, bands=division.bands)
        return slots_loss(tried, f"rotary width {width}")

    widths = sorted(draft.widths)
    best = widths.index(plan.target.qk_rope_head_dim)
    first = lost(widths[best])
    if first is None:
        return {}
    found = {widths[best]: first}
    for step in (-1, 1):
        start = best
        while 0 <= best + step < len(widths):
            width = widths[best + step]
            loss = lost(width)
            if loss is None:
                break
            found[width] = loss
            if loss >= found[widths[best]]:
                break
            best += step
        if best != start:
            break
    return found


def measure_intact(plan: Plan) -> float | None:
    """Measure the closed form with rotation left intact and a latent of as many numbers as are cached.

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
    cached = target.kv_lora_rank + target.qk_rope_head_dim
    sizes = {"rope": "intact", "rank": cached, "kv_budget": None, "cache_dtype": "bfloat16"}
    try:
        intact = make_draft(plan.source, request.model_copy(update=sizes), plan.statistics).plan
    except InvalidInput:
        return None
    return closed_form_loss(replace(intact, losses=plan.losses), "rotation intact")
