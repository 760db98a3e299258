"""The choice between a fitted and a linear latent norm, measured on tokens that no fit has seen."""

from dataclasses import replace

import torch

from ....checkpoints.shards import TensorSpec
from ....core.console import is_first
from ....core.errors import InvalidInput
from ....core.processes import from_first, together
from ..plan import Plan
from ..stock_norm import NOT_IN_HALF
from .layer_losses import closed_form_loss

# How much more a fitted norm may lose by the closed form: nats per token summed over all layers, or a share
# of the loss with a linear norm, whichever is more. Refinement recovers most (docs/notes/latent-norm.md).
NATS, SHARE = 0.005, 0.15
LAYERS = 4  # measured at most, of which the loss of all is estimated


def settle_norm(plan: Plan) -> Plan:
    """Return the plan with its latent norm chosen; a plan that has no choice is returned as it is.

    Every process of a distributed run gets what the first one measured.

    Raises:
        InvalidInput: a fitted norm was asked for, and there is nothing to fit it on.
    """
    if plan.latent_norm != "auto":
        return plan
    with together():
        if plan.statistics is None:
            option = "fitted" if plan.request.latent_norm == "fitted" else "auto with --dtype float16"
            raise InvalidInput(
                f"--latent-norm {option} needs the tokens of a calibration to fit a norm; use --calibration "
                "self, or --latent-norm linear in another dtype"
            )
        found = measure_norms(plan) if is_first() else None
    found = from_first(found)
    if found is None:
        return _with_linear_norm(
            plan, "the latent's norm is linear: this layer's loss cannot be measured on calibration text"
        )
    linear, fitted = found
    costs = (
        f"it raises the loss of the closed form on held-back calibration tokens from {linear:.4f} to "
        f"{fitted:.4f} nats"
    )
    if fitted > linear + max(NATS, SHARE * linear):
        return _with_linear_norm(
            plan,
            f"the latent's norm is linear, because a fitted one would cost more than {NATS} nats and "
            f"{SHARE:.0%} of the loss: {costs}",
        )
    told = [f"the latent's norm is fitted: {costs}, before refinement"]
    if f"{linear:.4f}" == f"{fitted:.4f}":  # it costs nothing that could be said
        told = []
    return replace(plan, latent_norm="fitted", notices=(*plan.notices, *told))


def measure_norms(plan: Plan) -> tuple[float, float] | None:
    """Measure a plan's closed form with linear and with fitted norms.

    Returns:
        Both losses on held-back tokens, in nats per token; None where `forward.attend` does not compute the
        attention.
    """
    linear, fitted = (
        closed_form_loss(replace(plan, latent_norm=norm), LAYERS, f"{norm} latent norm")
        for norm in ("linear", "fitted")
    )
    return None if linear is None or fitted is None else (linear, fitted)


def _with_linear_norm(plan: Plan, reason: str) -> Plan:
    """Return the plan with linear norms, in dtypes that hold them.

    Args:
        plan: the fold.
        reason: sentence for the user.
    """

    def held(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=torch.bfloat16) if spec.dtype == torch.float16 else spec

    layers = tuple(
        replace(layer, writes={name: held(spec) for name, spec in layer.writes.items()})
        for layer in plan.layers
    )
    halved = [NOT_IN_HALF] if torch.float16 in {spec.dtype for spec in plan.specs.values()} else []
    return replace(
        plan,
        latent_norm="linear",
        dtype=torch.bfloat16 if plan.dtype == torch.float16 else plan.dtype,
        layers=layers,
        copies={
            name: copy if copy.part is not None else replace(copy, spec=held(copy.spec))
            for name, copy in plan.copies.items()
        },
        notices=(*plan.notices, reason, *halved),
    )
