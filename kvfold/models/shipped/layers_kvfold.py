# Copyright 2026 The kvfold authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Parts of the attention: rotary embeddings, the norm of a latent, the kernel; shipped next to the weights.

Legend: attention_kvfold.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ALL_ATTENTION_FUNCTIONS

if not hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):  # transformers 4
    _functions: Any = ALL_ATTENTION_FUNCTIONS

    class _Interface:
        get_interface = staticmethod(_functions.get)

    ALL_ATTENTION_FUNCTIONS = _Interface()

LATENT_NORM_EPSILON = 2.0**28
LATENT_NORM_WEIGHT = 2.0**14
FITTED_NORM_EPSILON = 1e-6


def turns(position_BS: Tensor, frequencies_F: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, S, F) of the angles at positions."""
    angle_BSF = position_BS[..., None].float() * frequencies_F.float()
    return angle_BSF.cos().to(dtype), angle_BSF.sin().to(dtype)


class Positions:
    """The positions of a call's new tokens, and, from the layers that cache them on, of everything cached.

    An object of its own, which wrappers that copy dictionaries between devices leave alone; made anew for
    every call.

    Attributes:
        position_BT: of the new tokens.
        frequencies_F: of all tables.
        by_layer: (B, S) by the number of the layer that caches them.
    """

    def __init__(self, position_BT: Tensor, frequencies_F: Tensor) -> None:
        self.position_BT = position_BT
        self.frequencies_F = frequencies_F
        self.by_layer: dict[int, Tensor] = {}


class KvfoldRotaryEmbedding(nn.Module):
    """Cosines and sines of tables of frequencies, whatever rule they came from.

    It has the attributes by which transformers finds a rotary table and restores it after loading.
    """

    rope_type = "default"

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        frequencies_F, _ = self.compute_default_rope_parameters(config)
        self.register_buffer("inv_freq", frequencies_F, persistent=False)
        self.register_buffer("original_inv_freq", frequencies_F.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: Any, **_: Any) -> tuple[Tensor, float]:
        """Return the frequencies of all tables in float32, and the factor on cosines and sines.

        The factor is 1, because it is part of the scale.
        """
        return torch.tensor(config.kvfold["frequencies"], dtype=torch.float32).flatten(), 1.0

    def _apply(self, fn: Any, recurse: bool = True) -> "KvfoldRotaryEmbedding":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in list(self.named_buffers()):
            if (
                buffer.dtype != torch.float32
            ):  # a frequency in bfloat16 is off by whole turns at far positions
                setattr(self, name, self.compute_default_rope_parameters(self.config)[0].to(buffer.device))
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, *_: Any) -> tuple[Any, ...]:
        """Cosines and sines (B, T, F) in the dtype of x; for the intact form the positions too.

        Of the three positions of M-RoPE, which are equal in text, the first counts.
        """
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids
        turned = turns(position_ids, self.inv_freq, x.dtype)
        return (
            (*turned, Positions(position_ids, self.inv_freq))
            if self.config.kvfold["form"] == "intact"
            else turned
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs of x (B, heads, S, 2F), `interleaved` or in halves, by angles (B, S, F).

    The result is in halves.
    """
    cos, sin = cos[:, None], sin[:, None]
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)


class KvfoldLatentRMSNorm(nn.Module):
    """The identity in the form of an RMSNorm: c · weight / sqrt(mean(c²) + epsilon), epsilon = weight² ≫ c².

    vLLM knows latent attention by a norm between down- and up-projection, and keeps the latent compressed
    only then. The relative error is mean(c²) / 2^29. Where the configuration says that latents are fitted to
    their norm, it is an RMSNorm of the usual epsilon.
    """

    def __init__(self, config: Any, rank: int) -> None:
        super().__init__()
        fitted = config.kvfold.get("latent_norm") == "fitted"
        self.weight = nn.Parameter(torch.full((rank,), 1.0 if fitted else LATENT_NORM_WEIGHT))
        self.variance_epsilon = FITTED_NORM_EPSILON if fitted else LATENT_NORM_EPSILON

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) to (..., C)."""
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(dtype)


def adapt_call(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Adapt the call of families that name the cache `layer_past`, or rotate by `position_ids`."""
    kwargs = {"past_key_values" if name == "layer_past" else name: value for name, value in kwargs.items()}
    if module.rotary is not None and kwargs.get("position_ids") is not None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        kwargs["position_embeddings"] = module.rotary(hidden_states, kwargs["position_ids"])
    return args, kwargs


def add_features(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the features of new tokens to a call of a decoupled layer with key norms.

    They are an argument because vLLM knows a latent by a projection of an argument of `forward`.
    """
    hidden_states = args[0] if args else kwargs["hidden_states"]
    return args, {**kwargs, "features": module._features(hidden_states)}


def norms_of(stock: Any) -> tuple[Any, Any]:
    """Return the query and the key norm of a stock attention module, or None twice."""
    if not hasattr(stock, "k_layernorm"):
        return getattr(stock, "q_norm", None), getattr(stock, "k_norm", None)
    query, key = stock.q_layernorm, stock.k_layernorm
    if hasattr(key, "norms"):
        query, key = (KvfoldHeadsLayerNorm((n.num_heads, n.dim), n.norms[0].eps) for n in (query, key))
    return query, key


def dropout_of(stock: Any) -> float:
    """Return the rate at which a stock attention module drops attention weights in training.

    Classes store it under different names, as a number or as a module with one. Without any the rate is 0.
    """
    rates = (getattr(stock, name, None) for name in ("attention_dropout", "attn_dropout", "dropout"))
    rate = next((rate for rate in rates if rate is not None), 0.0)
    return float(getattr(rate, "p", rate))


def gate_of(stock: Any, name: str, hidden: int, rows: int) -> Any:
    """Return the projection of an output gate: the stock module's, or that of a part of its queries."""
    gate = getattr(stock, name, None)
    return nn.Linear(hidden, rows, bias=False) if gate is None else gate


def gated(output_BTE: Tensor, gate_BTX: Tensor, heads: int) -> Tensor:
    """Multiply all heads' outputs (B, T, NV) by the sigmoid of a gate of each dimension, or of each head."""
    parts_BTNV, gate_BTNX = (rows.unflatten(-1, (heads, -1)) for rows in (output_BTE, gate_BTX))
    product_BTE: Tensor = (parts_BTNV * gate_BTNX.sigmoid()).flatten(2)
    return product_BTE


def sized(norm: Any, width: Any) -> Any:
    """Return a norm of the source's width, or heads and width; the stock class makes it by the cache's."""
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    shape = [width] if isinstance(width, int) else width
    return norm if list(norm.weight.shape) == shape else norm.__class__(width, eps=epsilon)


class KvfoldHeadsLayerNorm(nn.Module):
    """LayerNorm of each head without bias, its weight (N, H): what StableLM has in N modules."""

    def __init__(self, shape: Any, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))
        self.eps = eps

    def forward(self, rows_BTNH: Tensor) -> Tensor:
        """(B, T, N, H) to the same."""
        normed_BTNH = nn.functional.layer_norm(rows_BTNH.float(), rows_BTNH.shape[-1:], eps=self.eps)
        return (normed_BTNH * self.weight.float()).to(rows_BTNH.dtype)


class KvfoldHeadwiseLinear(nn.Module):
    """A linear map of its own for each head."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads * outputs, inputs))
        self.heads = heads

    def forward(self, rows_BNTH: Tensor) -> Tensor:
        """(B, N, T, H) to (B, N, T, R)."""
        up_NRH: Tensor = self.weight.unflatten(0, (self.heads, -1))
        return rows_BNTH @ up_NRH.mT


def softmax(scores_BNTS: Tensor, mask: Tensor | None, module: Any) -> Tensor:
    """Attention weights of scores, bounded, masked and with sinks where the module has them.

    A boolean mask tells what is kept; any other is added to the scores.
    """
    if module.softcap is not None:
        scores_BNTS = torch.tanh(scores_BNTS / module.softcap) * module.softcap
    if mask is not None:
        mask = mask[..., : scores_BNTS.shape[-1]]
        least = torch.finfo(scores_BNTS.dtype).min
        scores_BNTS = (
            scores_BNTS.masked_fill(~mask, least) if mask.dtype == torch.bool else scores_BNTS + mask
        )
    if module.sinks is None:
        return scores_BNTS.softmax(-1, dtype=torch.float32).to(scores_BNTS.dtype)
    sinks_BNT1 = module.sinks.view(1, -1, 1, 1).expand(*scores_BNTS.shape[:-1], 1).to(scores_BNTS.dtype)
    weights = torch.cat([scores_BNTS, sinks_BNT1], dim=-1).softmax(-1, dtype=torch.float32)
    return weights[..., :-1].to(scores_BNTS.dtype)


def eager_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with query (B, N, T, H), key (B, K, S, H) and value (B, K, S, V).

    The result is (B, T, N, V), and the weights (B, N, T, S). Without a mask several tokens see those before
    them, and one token sees all, as in `sdpa`: masks made for it may be None.
    """
    if attention_mask is None and query.shape[-2] > 1:
        attention_mask = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()[None, None]
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    weights_BNTS = softmax(query @ key.mT * scaling, attention_mask, module)
    weights_BNTS = nn.functional.dropout(weights_BNTS, p=dropout, training=module.training)
    return (weights_BNTS @ value).transpose(1, 2).contiguous(), weights_BNTS


def level_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend by transformers' `sdpa`, but on a CPU with values padded to the width of keys.

    Arguments and results are as in `eager_attention`. The added columns are zeros, and so are those that are
    cut from the result. torch's fused kernel for CPUs takes one width only. With two widths torch forms all
    scores of all heads, which takes half as long again, and memory by the square of the length.
    """
    width, lacking = value.shape[-1], key.shape[-1] - value.shape[-1]
    if lacking <= 0 or value.device.type != "cpu" or query.shape[-2] == 1:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return plain
    padded = nn.functional.pad(value, (0, lacking))
    output_BTNQ, weights = sdpa_attention_forward(module, query, key, padded, attention_mask, **options)
    return output_BTNQ[..., :width], weights


LEVEL = "kvfold_sdpa"
AttentionInterface.register(LEVEL, level_attention)


def function_of(module: Any) -> str:
    """Return the name of a folded module's attention function: `sdpa` bounds no scores and has no sinks."""
    name = str(module.config._attn_implementation)
    if name != "sdpa":
        return name
    return LEVEL if module.softcap is None and module.sinks is None else "eager"


def places(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of a cache's update other than the new tokens.

    In transformers 4 these are the positions that a static cache writes to.
    """
    return [] if given.get("cache_position") is None else [{"cache_position": given["cache_position"]}]
