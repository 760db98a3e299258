"""Limits on attention that vLLM's latent attention does not have."""

from typing import Any


def check_limits(config: Any, longest: int) -> None:
    """Refuse limits on attention that vLLM's latent attention would silently leave out.

    Raises:
        NotImplementedError: it has a sliding window below `longest` tokens, or bounded scores.
    """
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    cap = getattr(config, "attn_logit_softcapping", None)
    found = ""
    if window and window < longest and (kinds is None or "sliding_attention" in kinds):
        found = f"a window of {window} tokens"
    elif cap is not None:
        found = f"scores bounded by {cap}"
    if found:
        raise NotImplementedError(
            f"the attention of this fold has {found}, and vLLM's latent attention has no such limit; use "
            "transformers, or fold with --rope intact"
        )
