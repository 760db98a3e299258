"""MLA in the source's own class with kvfold's attention, whose code is shipped with the weights.

Loading the output needs `trust_remote_code`. The shipped files are `FILES`; they import nothing of kvfold.
There are two forms, defined in attention_kvfold.py: `LatentAttention` becomes `decoupled`, `IntactAttention`
becomes `intact`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...checkpoints.directory import without_code
from ...checkpoints.shards import TensorSpec
from ...core.errors import InvalidInput
from ...models.remote_code import ARCHITECTURE, AUTO_MAP, FILES, HERE, MODEL_TYPE
from ..algebra.attention import Attention, IntactAttention, LatentAttention, NormedLatentAttention
from ..algebra.forward import AnyAttention
from ..algebra.rotary import rope_parameters
from ..algebra.target import Geometry, LatentTarget
from ..families.family import Family
from ..families.source import Source
from .container import Container

LATENT_NORM_WEIGHT = 2.0**14  # of layers_kvfold.py, whose norm with epsilon weight² is the identity


@dataclass(frozen=True, kw_only=True)
class Remote(Container):
    """One output in this format.

    Attributes:
        family: the source's row, for the names.
        geometry: the source's attention shape.
        target: widths and form.
        frequencies: of the slots, or of a head's pairs: a table or several, radians per token.
        tables: the number of each layer's table; empty where there is one.
        scale: factor on the scores.
        nope_width: un-rotated width of a decoupled query.
        biases: the roles (of q, k, v, o) that have one in the source.
        fitted: the norms of latent and queries are real ones, which the layers were fitted to; otherwise
            they are the identity.
        reordered: a head's dimensions are in another order than in the source, and so must norms be.
        layers: the numbers of the layers that attend; empty where all do.
        scaled: layers have different factors on their scores, which key norms leave to the query norms.
    """

    kind: ClassVar[str] = "remote"
    architecture: ClassVar[str] = ARCHITECTURE
    files: ClassVar[tuple[Path, ...]] = tuple(HERE / name for name in FILES)
    keeps_source_config: ClassVar[bool] = True

    family: Family
    geometry: Geometry
    target: LatentTarget
    frequencies: tuple[tuple[float, ...], ...]
    tables: tuple[int, ...] = ()
    scale: float
    nope_width: int = 0
    biases: frozenset[str]
    fitted: bool = False
    reordered: bool = False
    layers: tuple[int, ...] = ()
    scaled: bool = False

    @property
    def cached(self) -> tuple[int, int]:
        """Return the widths of the latent and of the rotary key, which intact rotation does without."""
        return self.target.kv_lora_rank, self.target.qk_rope_head_dim

    @property
    def heads(self) -> tuple[int, int]:
        """Return the widths of one head's un-rotated key and of its value."""
        return self.nope_width, self.geometry.head_dim

    @property
    def rebuilt(self) -> int:
        """Return the elements of keys and values that intact rotation rebuilds; otherwise 0."""
        return self.geometry.cache_elements if self._intact else 0

    @property
    def folds_jointly(self) -> bool:
        """Return whether keys and values come from one latent without a rotary key."""
        return not self.target.qk_rope_head_dim

    @property
    def query_rank(self) -> int | None:
        """Return q_lora_rank where the queries' norm is a real one."""
        return self.target.q_lora_rank if self.fitted else None

    @property
    def _place(self) -> str:
        """Return the module whose tensors are replaced; `{layer}` stands for the layer's number."""
        return (self.family.prefix + self.family.o).rpartition(".")[0]

    @property
    def _intact(self) -> bool:
        return self.target.rope == "intact"

    @property
    def _normed(self) -> bool:
        return self.family.k_norm is not None

    @property
    def _gate(self) -> str | None:
        gate = self.family.gate
        if gate is None:
            return None
        return "gate_proj" if gate == "q" else gate.rpartition(".")[2]

    @property
    def _biased(self) -> tuple[str, ...]:
        if self._intact:
            inner = self.biases & {"k", "v"}
            if inner and not self._normed:
                inner = frozenset({"kv"})  # one projection rebuilds both
            return tuple(sorted(inner | (self.biases & {"q", "o"})))
        # A value bias is a constant of the output; a key bias of the un-rotated part is one that softmax does
        # not see.
        key = "k" if self._normed else "kv"
        wanted = {"q": "q" in self.biases, key: "k" in self.biases, "o": bool({"v", "o"} & self.biases)}
        return tuple(role for role, there in wanted.items() if there)

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the output, made from the source's as it is on disk."""
        ours: dict[str, Any] = {
            "form": self.target.rope,
            "source_model_type": source["model_type"],
            "source_architecture": self.family.architecture,
            "attention": self._place,
            "frequencies": [list(table) for table in self.frequencies],
            "tables": list(self.tables),
            "scale": self.scale,
            "biases": list(self._biased),
            **self._growth(source),
            **({"layers": list(self.layers)} if self.layers else {}),
            **({} if self._gate is None else {"gate": self._gate}),
        }
        written = {
            **without_code(source),
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "auto_map": dict(AUTO_MAP),
            "v_head_dim": self.geometry.head_dim,
            "q_lora_rank": self.target.q_lora_rank,
        }
        if self._intact:
            ours |= {"head_dim": self.geometry.head_dim, "key_heads": self.geometry.num_key_value_heads}
        elif self._normed:
            ours |= {"head_dim": self.geometry.head_dim, "key_heads": self.geometry.num_key_value_heads}
            shapes = [self.family.norm_shape(which, self.geometry) for which in ("q", "k")]
            ours["norm_widths"] = [shape[0] if len(shape) == 1 else list(shape) for shape in shapes]
        if self._intact:
            # Not `kv_lora_rank`: engines take that for keys that a latent gives without rotation.
            return {**written, "latent_rank": self.target.kv_lora_rank, "kvfold": ours}
        widths = {
            "kv_lora_rank": self.target.kv_lora_rank,
            "qk_rope_head_dim": self.target.qk_rope_head_dim,
            "qk_nope_head_dim": self.nope_width,
        }
        norm = {"latent_norm": "fitted"} if self.fitted else {}
        return {**written, **widths, **self._cached_head(source), "kvfold": {**ours, **norm}}

    def _growth(self, source: Mapping[str, Any]) -> dict[str, list[float]]:
        """Return the rate and length of the queries' growth with position, in families that have it."""
        if self.family.query_growth is None:
            return {}
        rope = rope_parameters(dict(source))
        rate = rope.get(self.family.query_growth)
        length = rope.get("original_max_position_embeddings")
        if rate is None or length is None:
            raise InvalidInput(f"config.json's rope parameters lack {self.family.query_growth} or "
                               "original_max_position_embeddings; this family scales queries with "
                               "both")  # fmt: skip
        return {"growth": [rate, length]}

    def _cached_head(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that vLLM allocates its cache from, in families that have them.

        The stock rotary table then has that width.
        """
        if self.family.kv_heads != "num_key_value_heads" or self.layers:
            return {}  # where only some layers attend, the others may read these fields too
        width = self.target.kv_lora_rank + self.target.qk_rope_head_dim
        rope = source.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or source.get("rope_theta") or 1e4
        plain = {} if any(isinstance(value, dict) for value in rope.values()) else {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_scaling": None,
        }  # fmt: skip
        return {"head_dim": width, "num_key_value_heads": self.geometry.num_attention_heads, **plain}

    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of one layer's attention tensors."""
        place = self._place.format(layer=layer)
        shapes: dict[str, tuple[int, ...]] = {}
        for role, (name, rows, columns) in self._weights().items():
            shapes[f"{place}.{name}.weight"] = (rows, columns)
            if role in self._biased:
                shapes[f"{place}.{name}.bias"] = (rows,)
        if not self._intact:
            shapes[f"{place}.kv_a_norm.weight"] = (self.target.kv_lora_rank,)
            if self.target.q_lora_rank is not None:
                shapes[f"{place}.q_a_norm.weight"] = (self.target.q_lora_rank,)
                if "kv" in self._biased:
                    shapes[f"{place}.q_a_proj.bias"] = (self.target.q_lora_rank,)
        for which, name in self._written_norms(layer).items():
            shapes[name] = self.family.norm_shape(which, self.geometry)
        return {name: TensorSpec(dtype, shape) for name, shape in shapes.items()}

    def _weights(self) -> dict[str, tuple[str, int, int]]:
        """Return name, rows and columns of a layer's projections, in the order in which they are written.

        Keys are roles, and `_biased` says which of them has a bias. Two projections surround the latent; the
        role `kv` is the one that may have a bias: the projection from the latent where rotation is intact,
        otherwise the one to the latent and the rotary key.
        """
        heads, width = self.geometry.num_attention_heads, self.geometry.head_dim
        hidden, rank = self.geometry.hidden_size, self.target.kv_lora_rank
        rope, both = self.target.qk_rope_head_dim, 2 * self.geometry.num_key_value_heads * width
        read = both if self._normed else hidden  # behind key norms a latent reads keys and values
        if self._intact:
            weights = {
                **self._query_weights(heads * width),
                "kv": ("kv_b_proj", both, rank),
                "o": ("o_proj", hidden, heads * width),
                "unbiased": ("kv_a_proj", rank, read),
            }
        else:
            weights = {
                **self._query_weights(heads * (width if self._normed else self.nope_width + rope)),
                "kv": ("kv_a_proj_with_mqa", rank + rope, read),
                "unbiased": ("kv_b_proj", heads * (self.nope_width + width), rank),
                "o": ("o_proj", hidden, heads * width),
            }
            if self._normed:
                weights["slots"] = ("q_rope_proj", heads * rope, width)
        if self._normed:
            rows = self.geometry.num_key_value_heads * width
            weights |= {"k": ("k_proj", rows, hidden), "v": ("v_proj", rows, hidden)}
        if self.family.gate == "q":
            weights["gate"] = ("gate_proj", heads * width, hidden)
        return weights

    def _query_weights(self, rows: int) -> dict[str, tuple[str, int, int]]:
        """Return name, rows and columns of the weights that make the queries, by role."""
        hidden = self.geometry.hidden_size
        rank = self.target.q_lora_rank
        if rank is None:
            return {"q": ("q_proj", rows, hidden)}
        return {"q_a": ("q_a_proj", rank, hidden), "q": ("q_b_proj", rows, rank)}

    def norms(self, layer: int) -> tuple[str, ...]:
        """Return a layer's norms that are replaced too, in addition to what `Source.reads` names."""
        return tuple(
            name
            for which in self._written_norms(layer)
            if which == "q" or self.family.norm_spans == "head"
            for name in self.family.norms(which, layer, self.geometry)
        )

    def _written_norms(self, layer: int) -> dict[Literal["q", "k"], str]:
        """Return the output's norms that are read with the attention, by `q` and `k`; others pass through."""
        if self.family.k_norm is None:
            return {}
        changed = self.reordered or not self.family.k_norm.endswith(".k_norm.weight")
        written: dict[Literal["q", "k"], bool] = {
            "k": self.family.norm_spans != "head" or changed,
            "q": changed or self.scaled,
        }
        place = self._place.format(layer=layer)
        return {which: f"{place}.{which}_norm.weight" for which in written if written[which]}

    def tensors(self, attention: AnyAttention, layer: int) -> dict[str, Tensor]:
        """Return one folded layer's attention under the names and in the layout of the class."""
        assert not isinstance(attention, Attention)
        factor = attention.scale / self.scale
        if isinstance(attention, IntactAttention | NormedLatentAttention) and attention.q_norm_NH is not None:
            attention = replace(attention, q_norm_NH=attention.q_norm_NH * factor)
            factor = 1.0
        named = (
            self._rebuilt(attention, factor)
            if isinstance(attention, IntactAttention)
            else self._decoupled(attention, factor)
        )
        place = self._place.format(layer=layer)
        if self.family.gate == "q" and attention.gate_NHD is not None:
            named["gate_proj.weight"] = attention.gate_NHD.flatten(0, 1)
        written = {f"{place}.{name}": tensor for name, tensor in named.items()}
        if isinstance(attention, IntactAttention | NormedLatentAttention):
            weights = {"q": attention.q_norm_NH, "k": attention.k_norm_KH}
            for which, name in self._written_norms(layer).items():
                weight = weights[which]
                assert weight is not None, "the family has both norms"
                shape = self.family.norm_shape(which, self.geometry)
                written[name] = weight.reshape(shape) - self.family.norm_shift
        return written

    def _decoupled(self, attention: LatentAttention, factor: float) -> dict[str, Tensor]:
        rank, norm_C = len(attention.down_CD), attention.latent_norm_C
        query = "q_proj" if attention.q_down_AD is None else "q_b_proj"
        q_NMA = torch.cat([attention.q_nope_NPA, attention.q_rope_NRA], 1)
        named = {
            f"{query}.weight": q_NMA.flatten(0, 1) * factor,
            "kv_a_proj_with_mqa.weight": torch.cat([attention.down_CD, attention.k_rope_RD]),
            "kv_a_norm.weight": torch.full((rank,), LATENT_NORM_WEIGHT) if norm_C is None else norm_C,
            "kv_b_proj.weight": torch.cat([attention.k_up_NPC, attention.v_up_NHC], 1).flatten(0, 1),
            "o_proj.weight": attention.o_DNH.flatten(1),
        }
        if attention.q_down_AD is not None:
            compressed = len(attention.q_down_AD)
            assert not isinstance(attention.query_norm, Tensor), "one for all features"
            named |= {
                "q_a_proj.weight": attention.q_down_AD,
                "q_a_norm.weight": torch.full((compressed,), attention.query_norm or LATENT_NORM_WEIGHT),
            }
            if attention.k_rope_R is not None:
                named["q_a_proj.bias"] = attention.q_down_AD.new_zeros(compressed)
        if attention.q_nope_NP is not None and attention.q_rope_NR is not None:
            named[f"{query}.bias"] = (
                torch.cat([attention.q_nope_NP, attention.q_rope_NR], 1).flatten() * factor
            )
        if attention.k_rope_R is not None:
            named["kv_a_proj_with_mqa.bias"] = torch.cat(
                [attention.down_CD.new_zeros(rank), attention.k_rope_R]
            )
        if attention.o_D is not None:
            named["o_proj.bias"] = attention.o_D
        return named | (_features(attention, query) if isinstance(attention, NormedLatentAttention) else {})

    def _rebuilt(self, attention: IntactAttention, factor: float) -> dict[str, Tensor]:
        query = "q_proj" if attention.q_down_AD is None else "q_b_proj"
        named = {
            f"{query}.weight": attention.q_NHA.flatten(0, 1) * factor,
            "kv_a_proj.weight": attention.down_CE,
            "kv_b_proj.weight": torch.cat([attention.k_up_KHC, attention.v_up_KHC], 1).flatten(0, 1),
            "o_proj.weight": attention.o_DNH.flatten(1),
        }
        if attention.q_down_AD is not None:
            named["q_a_proj.weight"] = attention.q_down_AD
        key, value = attention.k_KH, attention.v_KH
        biases = {query: None if attention.q_NH is None else attention.q_NH * factor, "o_proj": attention.o_D}
        if attention.k_KHD is not None and attention.v_KHD is not None:
            named |= {
                "k_proj.weight": attention.k_KHD.flatten(0, 1),
                "v_proj.weight": attention.v_KHD.flatten(0, 1),
            }
            biases |= {"k_proj": key, "v_proj": value}
        elif key is not None or value is not None:
            zeros_KH = attention.k_up_KHC.new_zeros(attention.k_up_KHC.shape[:2])
            both = [zeros_KH if bias is None else bias for bias in (key, value)]
            named["kv_b_proj.bias"] = torch.cat(both, 1).flatten()
        return named | {f"{name}.bias": bias.flatten() for name, bias in biases.items() if bias is not None}

    def notices(self, source: Source, why: str | None) -> list[str]:
        """Return that the output's code must be trusted, and why it has code of its own."""
        because = "" if why is None else f": {why}"
        return [f"the output brings its own code, so loading it needs trust_remote_code=True{because}"]


def _features(attention: NormedLatentAttention, query: str) -> dict[str, Tensor]:
    """Return the tensors of a decoupled layer with key norms that others have not, or have otherwise."""
    named: dict[str, Tensor | None] = {
        f"{query}.weight": attention.q_NHA.flatten(0, 1),
        f"{query}.bias": None if attention.q_NH is None else attention.q_NH.flatten(),
        "q_rope_proj.weight": attention.q_rope_NRA.flatten(0, 1),
        "k_proj.weight": attention.k_KHD.flatten(0, 1),
        "k_proj.bias": None if attention.k_KH is None else attention.k_KH.flatten(),
        "v_proj.weight": attention.v_KHD.flatten(0, 1),
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}
