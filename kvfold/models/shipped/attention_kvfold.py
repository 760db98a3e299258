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
"""Two forms of latent attention for stock transformers models; shipped next to the weights.

Both cache a latent of `rank` numbers per token instead of keys and values:

    decoupled   c = down x; k = [k_up c; k_rope], v = v_up c;
                cached are c and the rotary key k_rope, which all heads share;
                where the source normalises keys, [norm(k); v] of the token is in the place of x for both
    intact      c = down x, or down [norm(k); v] where the source normalises keys;
                k = rotate(k_up c), v = v_up c; cached is c

Legend: B sequences, T tokens of this call, S tokens attended to, D hidden size, N query heads, K key/value
heads, H head dim, V value dim, P and R un-rotated and rotary width of a decoupled query, F = R/2 or H/2
rotary pairs, C latent rank.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .decoding_kvfold import absorbing_is_less, attend, attend_rotated, is_plain, rebuilding_is_less, tells
from .layers_kvfold import (
    ALL_ATTENTION_FUNCTIONS,
    KvfoldHeadwiseLinear,
    KvfoldLatentRMSNorm,
    KvfoldRotaryEmbedding,
    Positions,
    adapt_call,
    add_features,
    dropout_of,
    eager_attention,
    function_of,
    gate_of,
    gated,
    norms_of,
    places,
    rotate,
    sized,
    turns,
)

_DIGIT = 256  # positions are cached as digits of this base, which every floating type holds exactly


class _FoldedAttention(nn.Module):
    """The common part of both forms.

    The source's attention module `stock` is replaced by one in the same place with the same settings.
    """

    o_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    q_norm: Any
    k_norm: Any
    head_dim: int
    norm_spans_heads: bool  # as the query norm tells: of one key head the key norm has one width either way

    def __init__(self, config: Any, layer: int, stock: Any) -> None:
        # Not super(): the stock class is among the bases, and must not build its projections.
        nn.Module.__init__(self)
        self.config = config
        self.layer_idx = layer
        self.is_causal = True
        self.scaling = config.kvfold["scale"]
        self.attention_dropout = dropout_of(stock)
        self.sliding_window = getattr(stock, "sliding_window", None)
        self.softcap = getattr(config, "attn_logit_softcapping", None)
        self.sinks = getattr(stock, "sinks", None)
        self.growth = config.kvfold.get("growth")
        self.gate = config.kvfold.get("gate")
        if self.gate is not None:
            rows = config.num_attention_heads * config.v_head_dim
            setattr(self, self.gate, gate_of(stock, self.gate, config.hidden_size, rows))
        known = signature(stock.forward).parameters
        self.rotary = None if "position_embeddings" in known else KvfoldRotaryEmbedding(config)
        if "layer_past" in known or self.rotary is not None:
            self.register_forward_pre_hook(adapt_call, with_kwargs=True)

    def _options(self) -> dict[str, Any]:
        """Return the arguments of the attention function other than tensors and scale."""
        special = {"sliding_window": self.sliding_window, "softcap": self.softcap, "s_aux": self.sinks}
        given = {name: value for name, value in special.items() if value is not None}
        return {"dropout": self.attention_dropout if self.training else 0.0, **given}

    def _grown(self, query_BNTH: Tensor, position_ids: Any) -> Tensor:
        """Scale queries by their position, in families that do so."""
        if self.growth is None:
            return query_BNTH
        rate, length = self.growth
        factor_BT: Tensor = 1 + rate * torch.log1p(torch.floor(position_ids / length))
        return query_BNTH * factor_BT[:, None, :, None].to(query_BNTH.dtype)

    def _angles(self, turned: Any) -> tuple[Tensor, Tensor]:
        """Return this layer's columns (B, T, F) of the cosines and sines of all tables."""
        return self._own(turned[0]), self._own(turned[1])

    def _own(self, tables: Tensor) -> Tensor:
        """Return this layer's columns of a tensor with a column for each frequency of all tables."""
        pairs, numbers = len(self.config.kvfold["frequencies"][0]), self.config.kvfold["tables"]
        first = pairs * numbers[self.layer_idx] if numbers else 0
        return tables[..., first : first + pairs]

    def _heads(self, rows_BTE: Tensor, norm: Any) -> Tensor:
        """Return projected rows as heads (B, T, heads, H), normalised over the width of the norm."""
        # By name: vLLM takes a norm of a projection for the latent's, and follows positional arguments only.
        heads_BTNH = torch.unflatten(input=rows_BTE, dim=-1, sizes=(-1, self.head_dim))
        if norm is not None and self.norm_spans_heads:
            heads_BTNH, norm = norm(heads_BTNH.flatten(2)).unflatten(-1, (-1, self.head_dim)), None
        normed_BTNH: Tensor = heads_BTNH if norm is None else norm(heads_BTNH)
        return normed_BTNH

    def _features(self, hidden_states: Tensor) -> Tensor:
        """Return normed keys and values of all heads (B, T, 2KH)."""
        key_BTE = self._heads(self.k_proj(hidden_states), self.k_norm).flatten(2)
        return torch.cat([key_BTE, self.v_proj(hidden_states)], dim=-1)

    def _projected(self, output_BTE: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the output (B, T, D) of all heads' outputs (B, T, NV), behind a gate where there is one."""
        if self.gate is not None:
            gate_BTX = getattr(self, self.gate)(hidden_states)
            output_BTE = gated(output_BTE, gate_BTX, self.config.num_attention_heads)
        output_BTD: Tensor = self.o_proj(output_BTE)
        return output_BTD

    def _linear(self, role: str, inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=role in self.config.kvfold["biases"])


class KvfoldDecoupledAttention(_FoldedAttention):
    """Multi-head latent attention (arXiv 2405.04434) with any table of rotary frequencies."""

    def __init__(self, config: Any, layer: int, stock: Any) -> None:
        super().__init__(config, layer, stock)
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.num_key_value_groups = 1
        self.kv_lora_rank, self.q_lora_rank = config.kv_lora_rank, config.q_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim, config.v_head_dim
        encoded, query = hidden, heads * self.qk_head_dim
        self.k_norm = None
        if norms_of(stock)[1] is not None:
            norms = zip(norms_of(stock), config.kvfold["norm_widths"], strict=True)
            self.q_norm, self.k_norm = (sized(norm, width) for norm, width in norms)
            self.head_dim, groups = config.kvfold["head_dim"], config.kvfold["key_heads"]
            self.norm_spans_heads = self.q_norm.weight.shape[-1] != self.head_dim
            encoded, query = 2 * groups * self.head_dim, heads * self.head_dim
            self.k_proj = self._linear("k", hidden, groups * self.head_dim)
            self.v_proj = self._linear("v", hidden, groups * self.head_dim)
            self.register_forward_pre_hook(add_features, with_kwargs=True)
            self.q_rope_proj = KvfoldHeadwiseLinear(heads, self.head_dim, self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            self.q_proj = self._linear("q", hidden, query)
        else:
            # With a bias, which is zero, where the key has one: vLLM merges the two down-projections.
            self.q_a_proj = self._linear("kv", hidden, self.q_lora_rank)
            self.q_a_norm = KvfoldLatentRMSNorm(config, self.q_lora_rank)
            self.q_b_proj = self._linear("q", self.q_lora_rank, query)
        self.kv_a_proj_with_mqa = self._linear("kv", encoded, self.kv_lora_rank + self.qk_rope_head_dim)
        self.kv_a_norm = KvfoldLatentRMSNorm(config, self.kv_lora_rank)
        self.kv_b_proj = nn.Linear(
            self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False
        )
        self.o_proj = self._linear("o", heads * self.v_head_dim, hidden)

    def expand(self, latent_B1SC: Tensor, rope_B1SR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, N, S, P+R) and values (B, N, S, V).

        By its form, two arguments and a pair, vLLM finds and bypasses it.
        """
        up_BSE = self.kv_b_proj(latent_B1SC.squeeze(1))
        up_BNSE = up_BSE.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim)).transpose(1, 2)
        nope_BNSP, value_BNSV = up_BNSE.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return torch.cat([nope_BNSP, rope_B1SR.expand(-1, nope_BNSP.shape[1], -1, -1)], dim=-1), value_BNSV

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Any, ...] | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        features: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As every attention module of transformers.

        (B, T, D) to (B, T, D) and, where they are computed, the weights. `features` come from `add_features`.
        """
        batch, length = hidden_states.shape[:-1]
        if self.q_lora_rank is None:
            query_BTE = self.q_proj(hidden_states)
        else:
            query_BTE = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states)))
        if self.k_norm is not None:
            query_BNTQ = self._parts(self._heads(query_BTE, self.q_norm).transpose(1, 2))
        else:
            query_BNTQ = query_BTE.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
        query_BNTQ = self._grown(query_BNTQ, kwargs.get("position_ids"))
        compressed_BTE = self.kv_a_proj_with_mqa(hidden_states if self.k_norm is None else features)
        # Slices, because vLLM cannot follow unpacking where it does not know the shape of an argument.
        latent_BTC, rope_BTR = (
            compressed_BTE[..., : self.kv_lora_rank],
            compressed_BTE[..., self.kv_lora_rank :],
        )
        latent_B1SC = self.kv_a_norm(latent_BTC).unsqueeze(1)
        rope_B1SR = rope_BTR.unsqueeze(1)
        if self.qk_rope_head_dim:
            cos_BTF, sin_BTF = self._angles(position_embeddings)
            nope_BNTP, turned_BNTR = query_BNTQ.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            query_BNTQ = torch.cat([nope_BNTP, rotate(turned_BNTR, cos_BTF, sin_BTF, True)], dim=-1)
            rope_B1SR = rotate(rope_B1SR, cos_BTF, sin_BTF, True)
        cache = past_key_values if cache is None else cache  # `cache` from transformers 5.24 on
        if cache is not None:
            latent_B1SC, rope_B1SR = cache.update(latent_B1SC, rope_B1SR, self.layer_idx, *places(kwargs))
            if self._absorbs(length, latent_B1SC.shape[-2], attention_mask):
                output_BTE, weights = self._absorbed(query_BNTQ, latent_B1SC, rope_B1SR, attention_mask)
                return self._projected(output_BTE, hidden_states), weights
        key_BNSQ, value_BNSV = self.expand(latent_B1SC, rope_B1SR)
        # vLLM knows attention by this lookup and call in the text of `forward`, and gives outputs back flat.
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(function_of(self), eager_attention)
        output_BTNV, weights = attention(
            self,
            query_BNTQ,
            key_BNSQ,
            value_BNSV,
            attention_mask,
            scaling=self.scaling,
            **self._options(),
            **kwargs,
        )
        return self._projected(output_BTNV.reshape(batch, length, -1), hidden_states), weights

    def _parts(self, query_BNTH: Tensor) -> Tensor:
        """Return the un-rotated and the rotary part (B, N, T, P+R) of normed queries."""
        return torch.cat([query_BNTH[..., : self.qk_nope_head_dim], self.q_rope_proj(query_BNTH)], dim=-1)

    def _absorbs(self, length: int, seen: int, mask: Any) -> bool:
        """Return whether to attend in the latent."""
        return (
            not self.training
            and is_plain(self.kv_b_proj)
            and tells(mask, length)
            and absorbing_is_less(
                length, seen, nope=self.qk_nope_head_dim, rope=self.qk_rope_head_dim, value=self.v_head_dim,
                rank=self.kv_lora_rank,
            )
        )  # fmt: skip

    def _absorbed(
        self, query_BNTQ: Tensor, latent_B1SC: Tensor, rope_B1SR: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the up-projections moved to the few new tokens; return outputs (B, T, NV)."""
        up_NEC = self.kv_b_proj.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        output_BNTV, weights = attend(query_BNTQ, latent_B1SC, rope_B1SR, up_NEC, mask, self.scaling, self)
        return output_BNTV.transpose(1, 2).flatten(2), weights


class KvfoldIntactAttention(_FoldedAttention):
    """Grouped attention that caches a latent, rebuilds keys and values from it and then rotates the keys.

    A latent does not show the position of its token. The position is cached too, in three digits, by the
    first layer of each kind (`home`) for all layers of that kind. So every operation on a cache (beams,
    cropping, padding) is done to positions too.
    """

    def __init__(self, config: Any, layer: int, stock: Any) -> None:
        super().__init__(config, layer, stock)
        hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.kvfold["key_heads"]
        self.head_dim, self.v_head_dim = config.kvfold["head_dim"], config.v_head_dim
        self.num_key_value_groups = heads // groups
        kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
        self.home = kinds.index(kinds[layer]) if self.rotary is None else layer
        self.q_norm, self.k_norm = norms_of(stock)
        self.norm_spans_heads = self.q_norm is not None and self.q_norm.weight.shape[-1] != self.head_dim
        self.q_lora_rank = config.q_lora_rank
        if self.q_lora_rank is None:
            self.q_proj = self._linear("q", hidden, heads * self.head_dim)
        else:
            self.q_a_proj = nn.Linear(hidden, self.q_lora_rank, bias=False)
            self.q_b_proj = self._linear("q", self.q_lora_rank, heads * self.head_dim)
        encoded = hidden
        if self.k_norm is not None:
            self.k_proj = self._linear("k", hidden, groups * self.head_dim)
            self.v_proj = self._linear("v", hidden, groups * self.v_head_dim)
            encoded = groups * (self.head_dim + self.v_head_dim)
        self.kv_a_proj = nn.Linear(encoded, config.latent_rank, bias=False)
        self.kv_b_proj = self._linear("kv", config.latent_rank, groups * (self.head_dim + self.v_head_dim))
        self.o_proj = self._linear("o", heads * self.v_head_dim, hidden)

    def _encode(self, hidden_states: Tensor) -> Tensor:
        """Return the latent (B, 1, T, C)."""
        if self.k_norm is not None:
            hidden_states = self._features(hidden_states)
        latent_BTC: Tensor = self.kv_a_proj(hidden_states)
        return latent_BTC.unsqueeze(1)

    def _remember(
        self, latent_B1TC: Tensor, known: Positions, cache: Any, *where: Any
    ) -> tuple[Tensor, Tensor]:
        """Latents (B, 1, S, C) and positions (B, S) of everything cached, with the new tokens."""
        digits_B1TE = latent_B1TC[..., :0]
        if self.layer_idx == self.home:
            digits_BTE = torch.stack(
                [known.position_BT // _DIGIT**power % _DIGIT for power in range(3)], dim=-1
            )
            digits_B1TE = digits_BTE[:, None].expand(len(latent_B1TC), -1, -1, -1).to(latent_B1TC)
        latent_B1SC, digits_B1SE = cache.update(latent_B1TC, digits_B1TE, self.layer_idx, *where)
        if self.layer_idx == self.home:
            low_BS, middle_BS, high_BS = digits_B1SE.squeeze(1).float().unbind(-1)
            known.by_layer[self.home] = low_BS + _DIGIT * middle_BS + _DIGIT**2 * high_BS
        return latent_B1SC, known.by_layer[self.home].to(latent_B1SC.device)

    def expand(self, latent_B1SC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before rotation (B, K, S, H) and values (B, K, S, V)."""
        up_BKSE = (
            self.kv_b_proj(latent_B1SC.squeeze(1))
            .unflatten(-1, (-1, self.head_dim + self.v_head_dim))
            .transpose(1, 2)
        )
        key_BKSH, value_BKSV = up_BKSE.split([self.head_dim, self.v_head_dim], dim=-1)
        return key_BKSH, value_BKSV

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Any, ...],
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As every attention module of transformers.

        (B, T, D) to (B, T, D) and, where they are computed, the weights.
        """
        batch, length = hidden_states.shape[:-1]
        cos_BTF, sin_BTF = self._angles(position_embeddings)
        query_BTE = (
            self.q_proj(hidden_states)
            if self.q_lora_rank is None
            else self.q_b_proj(self.q_a_proj(hidden_states))
        )
        query_BNTH = self._heads(query_BTE, self.q_norm).transpose(1, 2)
        query_BNTH = self._grown(rotate(query_BNTH, cos_BTF, sin_BTF, False), kwargs.get("position_ids"))
        latent_B1SC = self._encode(hidden_states)
        cache = past_key_values if cache is None else cache  # `cache` from transformers 5.24 on
        if cache is not None:
            latent_B1SC, position_BS = self._remember(
                latent_B1SC, position_embeddings[2], cache, *places(kwargs)
            )
            frequencies_F = self._own(position_embeddings[2].frequencies_F).to(position_BS.device)
            if self._rebuilds(length, latent_B1SC.shape[-2], attention_mask):
                output_BNTV, weights = attend_rotated(
                    query_BNTH, latent_B1SC, position_BS, frequencies_F, self.kv_b_proj, self.v_head_dim,
                    attention_mask, self.scaling, self,
                )  # fmt: skip
                return self._projected(output_BNTV.transpose(1, 2).flatten(2), hidden_states), weights
            cos_BTF, sin_BTF = turns(position_BS, frequencies_F, hidden_states.dtype)
        key_BKSH, value_BKSV = self.expand(latent_B1SC)
        key_BKSH = rotate(key_BKSH, cos_BTF, sin_BTF, False)
        # vLLM knows attention by this lookup and call in the text of `forward`, and gives outputs back flat.
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(function_of(self), eager_attention)
        output_BTNV, weights = attention(
            self,
            query_BNTH,
            key_BKSH,
            value_BKSV,
            attention_mask,
            scaling=self.scaling,
            **self._options(),
            **kwargs,
        )
        return self._projected(output_BTNV.reshape(batch, length, -1), hidden_states), weights

    def _rebuilds(self, length: int, seen: int, mask: Any) -> bool:
        """Return whether to rebuild keys block by block, and values not at all."""
        widths = {"head": self.head_dim, "value": self.v_head_dim, "rank": self.config.latent_rank}
        heads, groups = self.config.num_attention_heads, self.config.kvfold["key_heads"]
        few = rebuilding_is_less(length, seen, heads=heads, groups=groups, **widths)
        return not self.training and is_plain(self.kv_b_proj) and tells(mask, length) and few


FORMS = {"decoupled": KvfoldDecoupledAttention, "intact": KvfoldIntactAttention}
