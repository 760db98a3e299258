"""MLA as dense `DeepseekV3ForCausalLM`: loads in unmodified transformers, no remote code.

The class normalises the latent (RMSNorm with epsilon 1e-6). A layer whose latent was fitted to that norm
(latent_norm.py) is written as it is. Any other must not be normalised, and its latent is written so small
that epsilon swamps it: RMSNorm(c) = c / sqrt(mean(c²) + 1e-6) is then c / 1e-3, a linear map, which the scale
of the down-projection cancels. The relative error is mean(c²) · LATENT_SCALE² / 2e-6, about 2e-9 for a latent
of unit size.

A query bias has no place in `q_proj`; sources that have one (Qwen2) go through the query compression instead,
with an identity as down-projection, one constant channel for the bias, and a norm of the same kind.

Transformers takes the class at any width; for other engines decide/serving_shape.py brings it into
widths that they take.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checkpoints.shards import TensorSpec
from ..algebra.attention import LatentAttention
from ..algebra.forward import AnyAttention
from ..algebra.rotary import rope_parameters
from ..algebra.target import Geometry, LatentTarget
from ..families.config_fields import former_rope
from ..families.latent_layout import latent_shapes
from ..families.source import Source
from .blocks import FoldedBlock
from .container import Container, Copy
from .serving_widths import NORM_EPSILON, Profile, Served

NORM_WEIGHT = 2.0**14  # a power of two, so that bf16 keeps it
LATENT_SCALE = NORM_EPSILON**0.5 / NORM_WEIGHT
_QUERY_SCALE = 2.0**-24  # the power of two next to LATENT_SCALE
_PREFIX = "model.layers.{layer}.self_attn."

_COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "hidden_act",
    "max_position_embeddings", "initializer_range", "rms_norm_eps", "bos_token_id", "eos_token_id",
    "pad_token_id",
    "attention_dropout", "use_cache",
)  # fmt: skip

_KEY_NORMS = (
    "the source normalises its queries and keys, and the stock class does not: linear functions of the "
    "layer's input stand for them, which costs part of the loss; --container remote keeps the norms"
)


@dataclass(frozen=True, kw_only=True)
class Stock(Container):
    """One output in this format.

    Attributes:
        geometry: the source's attention shape.
        target: widths.
        rope: rope parameters of the slots, with `rope_type` and `rope_theta`.
        biases: whether the source has attention biases.
        block: how the rest of a layer becomes the class's.
        served: the widths that other engines take; None for transformers, which takes any.
        mixed: some layers rotate nothing, so that all of their keys are in the latent.
        unread: query and key norms that the class has not; `{layer}` stands for the layer's number.
    """

    kind: ClassVar[str] = "stock"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    is_absorbable: ClassVar[bool] = True

    geometry: Geometry
    target: LatentTarget
    rope: Mapping[str, Any]
    biases: bool
    block: FoldedBlock = field(default_factory=FoldedBlock)
    served: Served | None = None
    mixed: bool = False
    unread: tuple[str, ...] = ()

    @property
    def cached(self) -> tuple[int, int]:
        """Return kv_lora_rank and qk_rope_head_dim, the widths that a layer caches per token."""
        if self.served is not None:
            return self.served.profile.latent, self.served.profile.rope
        return self.target.kv_lora_rank, self.target.qk_rope_head_dim

    @property
    def heads(self) -> tuple[int, int]:
        """Return qk_nope_head_dim and v_head_dim.

        The former is 0 where every pair of every layer has its slot.
        """
        if self.served is not None:
            return self.served.nope, self.served.value
        every = self.target.slots == "source" and not self.mixed
        return 0 if every else self.geometry.head_dim, self.geometry.head_dim

    @property
    def rebuilt(self) -> int:
        """Return the elements of all heads' keys and values, which transformers expands from the latent."""
        nope, value = self.heads
        return self.geometry.num_attention_heads * (nope + self.cached[1] + value)

    @property
    def holds_biases(self) -> bool:
        """Return whether the output has biases; the profiles of other engines have none."""
        return self.biases

    @property
    def profile(self) -> Profile | None:
        """Return the widths of other engines that the output was brought into, if it was."""
        return None if self.served is None else self.served.profile

    @property
    def query_rank(self) -> int | None:
        """Return q_lora_rank, including a constant channel for biases.

        It is the width of the residual stream where queries are compressed in name only.
        """
        rank = self.target.q_lora_rank
        if rank is None and (self.biases or (self.served is not None and self.served.compressed)):
            rank = self.geometry.hidden_size
        return rank if rank is None else rank + self.biases

    @property
    def _widths(self) -> dict[str, Any]:
        """Return the fields of config.json that the shapes of attention follow from."""
        (latent, rope), (nope, value) = self.cached, self.heads
        return {
            "kv_lora_rank": latent,
            "q_lora_rank": self.query_rank,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": nope,
            "v_head_dim": value,
            "attention_bias": self.biases,
        }

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the output, made from the source's."""
        return {
            "architectures": [self.architecture],
            "model_type": "deepseek_v3",
            **{key: source[key] for key in _COPIED if key in source},
            **self.block.config(source),
            **({} if self.served is None else {"rms_norm_eps": self.served.profile.epsilon}),
            "num_key_value_heads": self.geometry.num_attention_heads,
            **self._widths,
            # 5.x reads rope_parameters, 4.x the fields after it; writing only one loads silently wrong in
            # the other.
            "rope_parameters": dict(self.rope),
            **former_rope({"rope_parameters": self.rope}),
            "rope_interleave": True,
            # All layers are dense; the class wants numbers for experts that do not exist.
            "first_k_dense_replace": source["num_hidden_layers"],
            "moe_layer_freq": 1,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": source["intermediate_size"],
            "num_nextn_predict_layers": 0,
        }

    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of one layer's attention tensors."""
        shapes = latent_shapes({**vars(self.geometry), **self._widths})
        return {
            _PREFIX.format(layer=layer) + name: TensorSpec(dtype, shape) for name, shape in shapes.items()
        }

    def tensors(self, attention: AnyAttention, layer: int) -> dict[str, Tensor]:
        """Return one folded layer's attention under the names and in the layout of the class.

        The class scores with (qk_nope_head_dim + qk_rope_head_dim)^-½; any other scale goes into the query.
        """
        assert isinstance(attention, LatentAttention)
        assert self.biases or attention.q_nope_NP is attention.k_rope_R is attention.o_D is None, (
            "a bias would be lost"
        )
        slots = range(self.cached[1] // 2) if self.served is None else self.served.places
        attention = attention.widened(*self.cached, *self.heads, slots)
        q_NQA = torch.cat([attention.q_nope_NPA, attention.q_rope_NRA], 1)
        factor = attention.scale * q_NQA.shape[1] ** 0.5
        rank, hidden = attention.down_CD.shape
        norm_C = attention.latent_norm_C
        down_CD = attention.down_CD * LATENT_SCALE if norm_C is None else attention.down_CD
        named = {
            "q_proj.weight": q_NQA.flatten(0, 1) * factor,
            "kv_a_proj_with_mqa.weight": torch.cat([down_CD, attention.k_rope_RD]),
            "kv_a_layernorm.weight": torch.full((rank,), NORM_WEIGHT) if norm_C is None else norm_C,
            "kv_b_proj.weight": torch.cat([attention.k_up_NPC, attention.v_up_NHC], 1).flatten(0, 1),
            "o_proj.weight": self.block.adds(attention.o_DNH).flatten(1),
        }
        if self.query_rank is not None:
            named |= self._query(attention, named.pop("q_proj.weight"), factor)
        if self.biases:
            slot_R = attention.k_rope_R
            slot_R = torch.zeros_like(attention.k_rope_RD[:, 0]) if slot_R is None else slot_R
            named["kv_a_proj_with_mqa.bias"] = torch.cat([slot_R.new_zeros(rank), slot_R])
            named["o_proj.bias"] = (
                slot_R.new_zeros(hidden) if attention.o_D is None else self.block.adds(attention.o_D)
            )
        return {_PREFIX.format(layer=layer) + name: tensor for name, tensor in named.items()}

    def _query(self, attention: LatentAttention, q_QA: Tensor, factor: float) -> dict[str, Tensor]:
        """Return the query compression of one layer from its queries' rows (Q, A).

        The rows hold the factor on the scores.
        """
        if attention.query_norm is not None:
            assert attention.q_down_AD is not None
            assert isinstance(attention.query_norm, float), "one for all features"
            named = {
                "q_a_proj.weight": attention.q_down_AD,
                "q_a_layernorm.weight": torch.full((q_QA.shape[1],), attention.query_norm),
                "q_b_proj.weight": q_QA,
            }
            return named if attention.q_down_A is None else {**named, "q_a_proj.bias": attention.q_down_A}
        down_AD = attention.q_down_AD
        if down_AD is None:
            down_AD = torch.eye(q_QA.shape[1], dtype=q_QA.dtype)
        if self.biases:
            bias_Q = q_QA.new_zeros(len(q_QA))
            if attention.q_nope_NP is not None and attention.q_rope_NR is not None:
                bias_Q = torch.cat([attention.q_nope_NP, attention.q_rope_NR], 1).flatten() * factor
            q_QA = torch.cat([q_QA, bias_Q[:, None]], 1)
        return _compressed_query(q_QA, down_AD)

    def norms(self, layer: int) -> tuple[str, ...]:
        """Return a layer's norms that are replaced too, in addition to what `Source.reads` names."""
        return tuple(name.format(layer=layer) for name in self.unread)

    def copies(self, name: str, spec: TensorSpec) -> dict[str, Copy]:
        """Return what a tensor that is not attention becomes."""
        return self.block.copies(name, spec)

    def notices(self, source: Source, why: str | None) -> list[str]:
        """Return what was changed to hold the source, or for the engines that must run the output."""
        regressed = [_KEY_NORMS] if self.unread else []
        if self.served is None:
            return regressed
        return regressed + _brought_to_profile(source, self.target, self.served)


def _compressed_query(q_QE: Tensor, down_AD: Tensor) -> dict[str, Tensor]:
    """Write the query q = W down x + b as q_b(norm(q_a(x))).

    q_a passes on down x, and a constant for b where W has a column for it. It scales by a power of two that
    every dtype keeps; the norm and q_b undo that.
    """
    width, (rank, hidden) = q_QE.shape[-1], down_AD.shape
    named = {
        "q_a_proj.weight": torch.cat([down_AD, down_AD.new_zeros(width - rank, hidden)]) * _QUERY_SCALE,
        "q_a_layernorm.weight": torch.full((width,), NORM_WEIGHT),
        "q_b_proj.weight": q_QE * (LATENT_SCALE / _QUERY_SCALE),
    }
    if width > rank:
        named["q_a_proj.bias"] = q_QE.new_zeros(width)
        named["q_a_proj.bias"][-1] = _QUERY_SCALE
    return named


def _brought_to_profile(source: Source, target: LatentTarget, served: Served) -> list[str]:
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
