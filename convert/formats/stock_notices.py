"""Notices about outputs in the stock latent class: what was changed to hold a source in it."""

import math

from ..algebra.rotary import rope_parameters
from ..algebra.target import LatentTarget
from ..families.source import Source
from .serving_widths import Served

KEY_NORMS = (
    "the source normalises its queries and keys, and the stock class does not: linear functions of the "
    "layer's input stand for them, which costs part of the loss; --container remote keeps the norms"
)


def brought_to_profile(source: Source, target: LatentTarget, served: Served) -> list[str]:
    """Say what was changed to bring a source into the widths of other engines.

    The loss that this costs is measured with the rest.
    """
    profile = served.profile
    notices = []
    if (target.kv_lora_rank, target.qk_rope_head_dim) != (profile.latent, profile.rope):
        notices.append(
            f"the fold is {target.kv_lora_rank}+{target.qk_rope_head_dim} wide and padded with zeros, "
            f"so the cache is as large as that of {profile}"
        )
    if profile.cached >= source.geometry.cache_elements:
        notices.append(
            f"the cache is larger than the source's {source.geometry.cache_elements} elements, so this "
            f"output only proves that the format is exact"
        )
    scale = served.stream_scale
    if scale != 1:
        rounded = "exact: a power of two" if math.frexp(scale)[0] == 0.5 else "rounded once"
        notices.append(
            f"rms_norm_eps becomes {profile.epsilon}; embeddings and the outputs of layers are multiplied "
            f"by {scale:.6g}, which norms cancel ({rounded})"
        )
    kind = rope_parameters(source.config)["rope_type"]
    if kind != "default":
        notices.append(f"rope_type {kind} becomes a default table; pairs take slots of a near frequency")
    if source.biased:
        notices.append(
            "biases of queries, keys and values go into their weights, as the linear function of a layer's "
            "input that is nearest to a constant; the measured loss includes the error of this"
        )
    if served.compressed:
        notices.append(
            "queries pass through an identity first, which llama.cpp requires; each layer has hidden_size² "
            "more weights"
        )
    return notices
