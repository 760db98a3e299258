"""Notices about outputs in the stock latent class: which engines run them, and what changed for that."""

import math
from collections.abc import Mapping
from typing import Any

from ..algebra.rotary import rope_parameters
from ..algebra.target import LatentTarget
from ..families.source import Source
from .serving_widths import NORM_EPSILON, PROFILES, Served

KEY_NORMS = (
    "the source normalises its queries and keys, and the stock class does not: linear functions of the "
    "layer's input stand for them, which costs part of the loss; --container remote keeps the norms"
)


def transformers_only(
    config: Mapping[str, Any], rope_type: str, cached: tuple[int, int], *, biased: bool, linear: bool
) -> list[str]:
    """Say which engines would drop or misread an output without an error, and why.

    Args:
        config: the source's complete configuration, with the fields that the output changes.
        rope_type: of the output's rotary slots.
        cached: widths of latent and rotary key.
        biased: the output's attention has biases.
        linear: the norm of its latent is made linear, for one epsilon.
    """
    both: list[str] = []
    only_vllm: list[str] = []
    if biased:
        both.append("it has attention biases")
    if rope_type != "default":
        both.append("its rotary slots have a frequency table of their own")
    if linear and config.get("rms_norm_eps") != NORM_EPSILON:
        both.append(f"its rms_norm_eps is {config.get('rms_norm_eps')}, not {NORM_EPSILON}")
    if config["tie_word_embeddings"]:
        only_vllm.append("its head is tied to the embedding")
    if cached not in [(profile.latent, profile.rope) for profile in PROFILES]:
        only_vllm.append("its latent is {}+{} wide, not {}".format(*cached, " or ".join(map(str, PROFILES))))
    if not both and not only_vllm:
        return []
    engines = "vLLM and SGLang" if both else "vLLM"
    notice = (
        f"load the output in transformers; {engines} would not run it right, because "
        f"{', '.join(both or only_vllm)}"
    )
    if both and only_vllm:
        notice += f"; vLLM also because {', '.join(only_vllm)}"
    return [notice]


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
        notices.append(
            f"rope_type {kind} becomes the default table; each pair takes the slot with the nearest frequency"
        )
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
