"""A row of the table of families: where its checkpoints keep attention, and how that differs from Llama's.

A row holds properties (a fused projection, a key norm, interleaved pairs, ...). Code asks for those, never
for a family's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..algebra.target import Geometry


@dataclass(frozen=True, kw_only=True)
class Block:
    """The differences of a family's layers from Llama's by constants that weights can take up.

    Attributes:
        norm_shift: added to every norm's weight (Gemma).
        embedding_root: embeddings are multiplied by the root of the hidden size (Gemma).
        embedding, residual, logits: config fields of factors: on embeddings, on what a layer adds, under the
            logits (Granite).
        centred: LayerNorm without weights, which is RMSNorm when what it reads is centred (OLMo).
        gate_up: gate and up projection are one tensor (Phi-3).
        activation: of the MLP, unless config.json states another one.
    """

    norm_shift: float = 0.0
    embedding_root: bool = False
    embedding: str | None = None
    residual: str | None = None
    logits: str | None = None
    centred: bool = False
    gate_up: bool = False
    activation: str = "silu"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's row. `{layer}` stands for the layer's number; names are relative to `prefix`.

    Attributes:
        label: what people call the family.
        architecture: its causal language model in transformers.
        kind: its model_type, whose configuration class of transformers says what config.json leaves out.
        names: for a field of Llama's configuration the name that this family's has, where its class has no
            such alias.
        needs: config fields that kvfold reads only with one of these values.
        because: why not with others, as the end of a sentence.
        q, k, v, o: the four projections, without `.weight` or `.bias`.
        qkv: the one projection that stands for q, k and v.
        fused: its rows: `stacked` q, k, v; `grouped` the queries of a key head, the key, the value, then the
            next key head's.
        transposed: matrices are stored (input, output).
        q_norm, k_norm: RMSNorms between projection and rotation.
        norm_spans: what one of them normalises: a `head`, or all `heads` as one vector. `each`: they are
            LayerNorms without bias, of a head, whose weight has a row for each head. Where these rows are
            tensors of their own, `{head}` stands for the head's number.
        norm_flag: config field without which there are no such norms.
        norm_shift: added to the weights of those norms.
        late_norms: RMSNorms of each head stand behind the rotation: `weighted`, q_norm and k_norm, or `bare`,
            without weights, in the layers that rotate.
        rotary: rotated pairs are (i, i + R/2), `half`, or (2i, 2i + 1), `interleaved`, or (i + R/2, i),
            `reversed`, or there are none.
        rotates_partly: its class rotates the share of a head that partial_rotary_factor says; others rotate
            whole heads, so that a config.json with a smaller share is refused.
        stretches: a rope_type `dynamic` with a field `alpha` stretches the base once and for all.
        rotates: the config field that says whether any layer rotates: `position_embedding_type`, which is
            `rope`, or `rope_theta`, which is not null; None where layers rotate as the other fields say.
        unrotated: the config field that says which layers have no rotation; `sliding_window`: where it is
            given, all layers but those with a window; `layer_types`: all but those with a window.
        dense_rotate: the config field that is 1 where all layers without experts rotate, whatever they read.
        windowed: its class limits attention to a sliding window unless config.json turns that off; stated for
            families that the stock latent class can hold.
        mixers: some layers have another mixer than attention, whose cache does not grow: a recurrence or a
            convolution.
        gate: the projection of the layer's input whose sigmoid multiplies each head's output; `q` where it is
            the second half of each head's rows there; None where there is no gate.
        scale: config field and exponent of the factor on the scores; the head dim and -1/2 when None.
        scale_by_layer: config field that has layer n divide its scores by n + 1.
        query_growth: field r of the rope parameters: queries grow by 1 + r·log(1 + position // L), where L is
            original_max_position_embeddings.
        soft_cap: config field of a bound on the scores.
        clip: config field of a bound on each number of queries, keys and values before rotation, or null.
        sinks: a learnt score of every query head that takes part in the softmax.
        value_norm: values pass an RMSNorm of each head without weights.
        key_values: config field by which layers that read all positions take their keys, as they are before
            norm and rotation, for values.
        followers: config field with the number of last layers that read the keys and values of an earlier
            layer of their kind.
        unlike: layers of one kind may differ from others in the width of heads and in key/value heads; the
            rules are in layer_shapes.py.
        latent: its attention is latent already (arXiv 2405.04434), with the tensors of latent_layout.py.
        unlatent: why no output format of latent attention holds the family, even where config.json turns its
            norms off; None where one may.
        kv_heads: config field with the key/value heads; None where the class has as many as query heads.
        host: another family whose class computes the same and has fewer key/value heads
            (host_class.py in formats/).
        block: how the rest of a layer differs from Llama's; a sentence where constants do not bridge it.
        embedding: the token embeddings; head: the language model's, which has no prefix and may be tied to
            them.
        caches_queries: transformers' class caches keys and values once for every query head.
    """

    label: str
    architecture: str
    kind: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    because: str = ""
    prefix: str = "model."
    q: str = "layers.{layer}.self_attn.q_proj"
    k: str | None = "layers.{layer}.self_attn.k_proj"
    v: str | None = "layers.{layer}.self_attn.v_proj"
    o: str = "layers.{layer}.self_attn.o_proj"
    qkv: str | None = None
    fused: Literal["stacked", "grouped"] = "stacked"
    transposed: bool = False
    q_norm: str | None = None
    k_norm: str | None = None
    norm_spans: Literal["head", "heads", "each"] = "head"
    norm_flag: str | None = None
    norm_shift: float = 0.0
    late_norms: Literal["weighted", "bare"] | None = None
    rotary: Literal["half", "interleaved", "reversed"] | None = "half"
    rotates_partly: bool = False
    stretches: bool = False
    rotates: Literal["position_embedding_type", "rope_theta"] | None = None
    unrotated: str | None = None
    dense_rotate: str | None = None
    windowed: bool = False
    mixers: bool = False
    gate: str | None = None
    scale: tuple[str, float] | None = None
    scale_by_layer: str | None = None
    query_growth: str | None = None
    soft_cap: str | None = None
    clip: str | None = None
    sinks: str | None = None
    value_norm: bool = False
    key_values: str | None = None
    followers: str | None = None
    unlike: bool = False
    latent: bool = False
    unlatent: str | None = None
    kv_heads: str | None = "num_key_value_heads"
    host: str | None = None
    block: Block | str = Block()
    embedding: str = "embed_tokens.weight"
    head: str = "lm_head.weight"
    caches_queries: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the projections by role: q, k, v, o, or qkv and o.

        In the row of one layer, k and v are missing where it has none of its own.
        """
        if self.qkv is not None:
            return ("qkv", "o")
        return tuple(role for role in ("q", "k", "v", "o") if getattr(self, role) is not None)

    def projections(self, layer: int) -> dict[str, str]:
        """Return the names of a layer's projections by role, which are modules in transformers."""
        return {role: self.prefix + str(getattr(self, role)).format(layer=layer) for role in self.roles}

    @property
    def normalises(self) -> bool:
        """Return whether any layer has query and key norms."""
        return self.k_norm is not None or self.late_norms is not None

    @property
    def query_parts(self) -> int:
        """Return how many rows the query projection has for each of a query's dimensions."""
        return 2 if self.gate == "q" else 1

    def norms(self, which: Literal["q", "k"], layer: int, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors of a layer's query or key norm; empty without one."""
        name = self.q_norm if which == "q" else self.k_norm
        if name is None:
            return {}
        shape = (geometry.head_dim,) if "{head}" in name else self.norm_shape(which, geometry)
        heads = geometry.num_attention_heads if which == "q" else geometry.num_key_value_heads
        return {self.prefix + name.format(layer=layer, head=head): shape for head in range(heads)}

    def norm_shape(self, which: Literal["q", "k"], geometry: Geometry) -> tuple[int, ...]:
        """Return the shape of the weight of a query or key norm as one tensor."""
        heads = geometry.num_attention_heads if which == "q" else geometry.num_key_value_heads
        width = geometry.head_dim
        return {"head": (width,), "heads": (heads * width,), "each": (heads, width)}[self.norm_spans]
