"""A checkpoint seen as layers of attention: which tensors belong to a layer, and what they say."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...checkpoints.directory import Checkpoint
from ...checkpoints.quantised.packed_checkpoint import open_checkpoint
from ...checkpoints.record import check_unfolded
from ...core.errors import InvalidInput
from ...models.expected_weights import check_weights
from ..algebra.attention import Attention, LatentAttention
from ..algebra.forward import Scoring
from ..algebra.rotary import FIXED, frequencies, longrope_factor
from ..algebra.target import Geometry, LatentGeometry
from .config_fields import check_layers, known_ids
from .family import Family
from .latent_layout import latent_shapes, read_latent, yarn_scale
from .layers.layer_kinds import reach_of
from .layers.layer_rotation import check_rotation, fixed_rotation, layer_rope
from .layers.layer_shapes import LayerShape, donor_of, own_geometry, own_row
from .packing import half_order, unpack
from .recognition import attending, complete, configured, family_of, geometry_of, rotary_width, rotated

# A pair that does not rotate has this frequency: longrope factors can say it, and its angle is nothing at any
# position.
STILL = 1e-30


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of a known family, whose attention tensors have been checked against config.json.

    Attributes:
        checkpoint: the directory.
        config: its config.json, with the family's defaults where it says nothing, under the names that
            Llama's has.
        family, geometry: what it is; the family's prefix is the one that this checkpoint's names have. Where
            layers are unlike, `shape` has those of each.
        biases: the projections that have one.
        rotary_width: how many of a head's dimensions rotate, in a layer of this geometry.
    """

    checkpoint: Checkpoint
    config: dict[str, Any]
    family: Family
    geometry: Geometry
    biases: frozenset[str]
    rotary_width: int

    @property
    def stored_config(self) -> dict[str, Any]:
        """Return config.json as it is on disk, except for a missing architecture and a tied head.

        A head with numbers of its own is not called tied.
        """
        stored = self.checkpoint.config
        if not stored.get("architectures"):
            stored = {**stored, "architectures": [self.family.architecture]}
        if complete(self.family, stored)["tie_word_embeddings"] and not self.config["tie_word_embeddings"]:
            return {**stored, "tie_word_embeddings": False}
        return stored

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def attending(self) -> tuple[int, ...]:
        """Return the numbers of the layers that attend, which a fold changes: in most families all."""
        return attending(self.family, self.config)

    @property
    def folded(self) -> tuple[int, ...]:
        """Return the numbers of the layers whose tensors a fold changes.

        They are those that attend, and those that read the keys and values of one of them.
        """
        return tuple(range(self.layers)) if not self.family.mixers else self.attending

    def donor(self, layer: int) -> int | None:
        """Return the layer whose keys and values a layer reads; None where it has its own."""
        return donor_of(self.family, self.config, layer)

    def keys_are_values(self, layer: int) -> bool:
        """Return whether a layer's values are its keys, as they are before norm and rotation."""
        donor = self.donor(layer)
        row = self.shape(layer if donor is None else donor).family
        return row.v is None and row.k is not None

    def followers(self, layer: int) -> tuple[int, ...]:
        """Return the layers that read a layer's keys and values in addition to it."""
        return tuple(number for number in self.folded if self.donor(number) == layer)

    def shape(self, layer: int) -> LayerShape:
        """Return the row, the heads and the rotary width of one layer.

        Where it reads another's keys and values, the row is without them, and the heads are those of all.
        """
        return shape_of(self.family, self.config, self.geometry, layer)

    @property
    def kinds(self) -> dict[str, int]:
        """Return the number of layers of each kind, where some do not attend; empty where all do."""
        if not self.family.mixers:
            return {}
        return dict(Counter(self.config["layer_types"]))

    @property
    def positions(self) -> int:
        """Return max_position_embeddings."""
        return int(self.config["max_position_embeddings"])

    @property
    def biased(self) -> frozenset[str]:
        """Return which of q, k, v and o have a bias, fused or not."""
        return frozenset("qkv") | self.biases & {"o"} if "qkv" in self.biases else self.biases

    @property
    def norms(self) -> tuple[str, ...]:
        """Return the names of query and key norms, in which `{layer}` stands for the layer's number."""
        names = filter(None, (self.family.q_norm, self.family.k_norm))
        return tuple(self.family.prefix + name for name in names)

    @property
    def reordered(self) -> bool:
        """Return whether a head's dimensions are in another order in `attention` than in the checkpoint."""
        head_dim = self.geometry.head_dim
        return not torch.equal(half_order(self.family, head_dim, self.rotary_width), torch.arange(head_dim))

    def order_of(self, layer: int) -> Tensor:
        """Return, for each dimension of a layer's head in `attention`, its place in the checkpoint, (H,)."""
        own = self.shape(layer)
        return half_order(own.family, own.geometry.head_dim, own.rotary_width)

    @property
    def rotating(self) -> tuple[int, ...]:
        """Return the layers that rotate their queries and keys."""
        return tuple(layer for layer in self.attending if rotated(self.family, self.config, layer))

    @property
    def mixed(self) -> bool:
        """Return whether some of the layers that attend rotate and others do not."""
        return 0 < len(self.rotating) < len(self.attending)

    @property
    def layers_by_table(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers that rotate, those of one rotary table together."""
        groups: dict[str, list[int]] = {}
        for layer in self.rotating:
            groups.setdefault(str(layer_rope(self.config, layer)), []).append(layer)
        return tuple(map(tuple, groups.values()))

    def slot_frequencies(self) -> tuple[Tensor, float]:
        """Return `frequencies` for all layers that rotate, where one table serves all; others need no slots.

        Raises:
            InvalidInput: they depend on the length of the input, or layers differ.
        """
        one_table = self.mixed and len(self.layers_by_table) == 1
        return self.frequencies(self.rotating[0] if one_table else None)

    def frequencies(self, layer: int | None = None) -> tuple[Tensor, float]:
        """Return angular frequencies (F,) of a head's pairs, and the factor on their cosines and sines.

        Pairs that do not rotate come after those that do, at a frequency that is practically zero.

        Raises:
            InvalidInput: they depend on the length of the input, or no layer is named and layers differ.
        """
        if layer is None:
            kinds = {
                (rotated(self.family, self.config, n), str(layer_rope(self.config, n)))
                for n in self.attending
            }
            if len(kinds) > 1:
                raise InvalidInput(
                    "the layers have different rotary embeddings, but one set of rotary slots serves all; "
                    "use --to gqa"
                )
            layer = self.attending[0]
        own = self.shape(layer)
        still_F = torch.full((own.geometry.head_dim // 2,), STILL, dtype=torch.float64)
        if not own.rotary_width or not rotated(self.family, self.config, layer):
            return still_F, 1.0
        table_F, factor = frequencies(layer_rope(self.config, layer), own.rotary_width, self.positions)
        return torch.cat([table_F.clamp_min(STILL), still_F[len(table_F) :]]), factor

    def nominal_frequencies(self, layer: int) -> tuple[Tensor, float]:
        """Return the same for methods that only weigh by frequencies.

        Where frequencies depend on the input's length, these are those of short inputs.
        """
        rope = layer_rope(self.config, layer)
        if (
            rope["rope_type"] in FIXED
            or not self.rotary_width
            or not rotated(self.family, self.config, layer)
        ):
            return self.frequencies(layer)
        base_F, _ = frequencies({**rope, "rope_type": "default"}, self.rotary_width, self.positions)
        still_F = torch.full((self.geometry.head_dim // 2 - len(base_F),), STILL, dtype=torch.float64)
        short_F = torch.tensor(rope.get("short_factor") or [1.0], dtype=torch.float64)
        if len(short_F) not in (1, len(base_F)):
            raise InvalidInput(
                f"config.json has a short_factor of {len(short_F)} numbers for {len(base_F)} rotary pairs"
            )
        return torch.cat([base_F / short_F, still_F]), longrope_factor(rope, self.positions)

    def reads(self, layer: int) -> tuple[str, ...]:
        """Return the tensors of a layer's attention that a fold replaces."""
        if self.family.latent:
            return tuple(self.latent_place(layer) + name for name in latent_shapes(self.config))
        own = self.shape(layer)
        norms = () if own.family.norm_spans == "head" else own.family.norms("k", layer, own.geometry)
        return *self._names(layer).values(), *norms

    def _names(self, layer: int) -> dict[str, str]:
        return {
            f"{role}.{part}": f"{name}.{part}"
            for role, name in self.shape(layer).family.projections(layer).items()
            for part in ("weight", "bias")
            if part == "weight" or role in self.biases
        }

    def latent_place(self, layer: int) -> str:
        """Return what the names of a layer's attention tensors begin with, where it is latent already."""
        return self.family.projections(layer)["o"].removesuffix("o_proj")

    def latent_attention(self, layer: int) -> LatentAttention:
        """Return a layer's attention, float64, where it is latent already."""
        assert isinstance(self.geometry, LatentGeometry)
        place = self.latent_place(layer)
        return read_latent(
            {name: self.checkpoint[place + name].to(torch.float64) for name in latent_shapes(self.config)},
            self.geometry,
            interleaved=self.family.rotary != "half",
            scale=self.scale(layer),
            factor=self.nominal_frequencies(layer)[1],
        )

    def latent_frequencies(self, layer: int) -> Tensor:
        """Return the frequencies (R/2,) of the rotary key's pairs, where attention is latent already."""
        assert isinstance(self.geometry, LatentGeometry)
        return self.nominal_frequencies(layer)[0][: self.geometry.qk_rope_head_dim // 2]

    def attention(self, layer: int, rotary_factor: float = 1.0) -> Attention:
        """Return a layer's attention, float64.

        Args:
            layer: its number.
            rotary_factor: factor on the cosines and sines, which goes into the scale, or, where a part of a
                head does not rotate, into the queries.
        """
        own, donor = self.shape(layer), self.donor(layer)
        names = {} if donor is None else self._names(donor)
        names |= self._names(layer)
        if self.family.gate not in {None, "q"}:
            names["gate.weight"] = f"{self.family.prefix}{self.family.gate}.weight".format(layer=layer)
        tensors = {role: self.checkpoint[name].to(torch.float64) for role, name in names.items()}
        for which in ("q", "k"):
            place = layer if donor is None or which == "q" else donor
            norm = self._norm(which, place)
            if norm is not None:
                tensors[f"{which}_norm"] = norm
        late = self._has_late_norms(layer)
        rotary_factor = 1.0 if late else rotary_factor  # which such a norm takes away
        partial = rotary_factor != 1 and own.rotary_width < own.geometry.head_dim
        scale = self.scale(layer) * (1 if partial else rotary_factor**2)
        attention = unpack(tensors, self.family, own.geometry, own.rotary_width, scale)
        attention = _with_late_norms(attention) if late else attention
        if not partial:
            return attention
        gain_H = self._pair_gains(rotary_factor).repeat(2)
        if attention.q_norm_NH is not None:  # a factor in front of the norm would not pass it
            return replace(attention, q_norm_NH=attention.q_norm_NH * gain_H)
        q_NH = None if attention.q_NH is None else attention.q_NH * gain_H
        return replace(attention, q_NHD=attention.q_NHD * gain_H[:, None], q_NH=q_NH)

    def _norm(self, which: Literal["q", "k"], layer: int) -> Tensor | None:
        """Return the weight of a layer's query or key norm, flat, float64."""
        own = self.shape(layer)
        names = own.family.norms(which, layer, own.geometry)
        weights = [self.checkpoint[name].to(torch.float64).flatten() for name in names]
        return torch.cat(weights) if weights else None

    def _pair_gains(self, rotary_factor: float) -> Tensor:
        """Return the gain of each pair's share of a score from a factor on cosines and sines, (F,)."""
        gain_F = torch.ones(self.geometry.head_dim // 2, dtype=torch.float64)
        gain_F[: self.rotary_width // 2] = rotary_factor**2
        return gain_F

    def _has_late_norms(self, layer: int) -> bool:
        """Return whether a layer normalises each head between rotation and scores.

        A rotation keeps the length of a head, so such a norm divides by the same number as one in front of
        it. Only their weights differ: behind the rotation, those of queries and keys are one gain on each
        dimension's share of a score. What is common to a rotary pair's two gains could as well be in front of
        the rotation, so `attention` has it as the weight of the query's norm. The rest stays behind it.
        """
        if self.family.late_norms == "bare":
            return rotated(self.family, self.config, layer)
        return self.family.late_norms is not None

    def _late_gain(self, layer: int) -> Tensor | None:
        """Return that rest, the gain of each dimension behind the rotation, (H,); None for bare norms."""
        query, key = self._norm("q", layer), self._norm("k", layer)
        if query is None or key is None:
            return None
        return _pair_gain((query * key)[self.order_of(layer)])[1]

    def scoring(self, layer: int, rotary_factor: float = 1.0) -> Scoring:
        """Return the parts of a layer's attention that are not weights, float64."""
        family, sinks_N = self.family, None
        if family.sinks is not None:
            sinks_N = self.checkpoint[family.prefix + family.sinks.format(layer=layer)].to(torch.float64)
        bounded = family.soft_cap is not None and self.config[family.soft_cap] is not None
        late = self._has_late_norms(layer)
        return Scoring(
            norm_epsilon=float(self.config["rms_norm_eps"]) if family.normalises else 0.0,
            soft_cap=float(self.config[str(family.soft_cap)]) if bounded else None,
            window=self.window(layer),
            bound=self.bound,
            sinks_N=sinks_N,
            pair_gain_F=None if rotary_factor == 1 or late else self._pair_gains(rotary_factor),
            late_gain_H=self._late_gain(layer) if late else None,
            value_norm=family.value_norm,
            key_values=self.keys_are_values(layer),
        )

    @property
    def bound(self) -> float | None:
        """Return the bound on each number of queries, keys and values; None where there is none."""
        return None if self.family.clip is None else self.config.get(self.family.clip)

    def window(self, layer: int) -> int | None:
        """Return the most positions that a query of a layer reads; None where it reads all."""
        return reach_of(self.config, layer)

    def scale(self, layer: int) -> float:
        """Return the factor on a layer's scores."""
        if self.family.latent:
            return float(self.geometry.head_dim**-0.5) * yarn_scale(self.config) ** 2
        base, exponent = self.geometry.head_dim, -0.5
        if self.family.scale is not None:
            field, exponent = self.family.scale
            base = self.config[field]
        by_layer = self.family.scale_by_layer and self.config.get(self.family.scale_by_layer)
        return float(base**exponent) / (layer + 1 if by_layer else 1)


def _with_late_norms(attention: Attention) -> Attention:
    """Return a layer whose norms behind the rotation are in front of it, as far as they may be."""
    ones_1H = attention.k_KHD.new_ones(1, attention.k_KHD.shape[1])
    if attention.q_norm_NH is None or attention.k_norm_KH is None:
        return replace(attention, q_norm_NH=ones_1H, k_norm_KH=ones_1H)
    common_1H, _ = _pair_gain(attention.q_norm_NH * attention.k_norm_KH)
    return replace(attention, q_norm_NH=common_1H, k_norm_KH=ones_1H)


def _pair_gain(product_XH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root mean square of each pair's two gains, and what is left of each gain."""
    real, imaginary = product_XH.chunk(2, -1)
    common = ((real.square() + imaginary.square()) / 2).sqrt().clamp_min(torch.finfo(product_XH.dtype).tiny)
    common_XH = torch.cat([common, common], -1)
    return common_XH, product_XH / common_XH


def open_source(place: Path | Checkpoint) -> Source:
    """Open the checkpoint in a directory, or one whose tensors are read from elsewhere."""
    directory = place if isinstance(place, Path) else place.directory
    check_unfolded(directory)
    checkpoint = open_checkpoint(place) if isinstance(place, Path) else place
    family = family_of(checkpoint.config)
    if family.embedding in checkpoint and family.prefix + family.embedding not in checkpoint:
        family = replace(family, prefix="")  # saved as the bare model, as the first GPT-2 checkpoints are
    embedding = family.prefix + family.embedding
    config = complete(family, checkpoint.config)
    geometry = geometry_of(config)
    check_layers(config, mixers=family.mixers)
    family = configured(family, config)  # which layers rotate may be known only now
    config |= known_ids(config, config["vocab_size"])
    layers = attending(family, config)
    if not family.mixers:
        layers = tuple(range(config["num_hidden_layers"]))
    own = {layer: shape_of(family, config, geometry, layer) for layer in layers}
    roles = family.projections(layers[0]).items()
    biases = frozenset(role for role, name in roles if f"{name}.bias" in checkpoint)
    stores_both = family.head in checkpoint and embedding in checkpoint
    if config["tie_word_embeddings"] and stores_both and not checkpoint.are_equal(family.head, embedding):
        config["tie_word_embeddings"] = False  # transformers 5 then loads both, whatever config.json says
    width = rotary_width(family, config, geometry.head_dim)
    source = Source(
        checkpoint=checkpoint,
        config=config,
        family=family,
        geometry=geometry,
        biases=biases,
        rotary_width=width,
    )
    ours = fixed_rotation(config, {layer: own[layer].rotary_width for layer in source.rotating if width})
    tables = check_weights(checkpoint, family.prefix + family.o.partition(".{layer}")[0])
    check_rotation(ours, tables, family.architecture)
    return source


def shape_of(family: Family, config: Mapping[str, Any], geometry: Geometry, layer: int) -> LayerShape:
    """Return the row, the heads and the rotary width of one layer."""
    heads = own_geometry(family, config, geometry, layer)
    return LayerShape(
        family=own_row(family, config, layer),
        geometry=heads,
        rotary_width=rotary_width(family, config, heads.head_dim),
    )
