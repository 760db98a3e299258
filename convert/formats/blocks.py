"""Everything in a family's layers apart from attention, as weights of Llama's block.

The stock latent class shares that block. Factors on embeddings, on the outputs of layers and under the logits
go into the neighbouring matrices. A norm's constant goes into its weight. LayerNorm without weights is
RMSNorm once everything that enters the residual stream has mean zero. Where the head stays the embeddings,
the last norm undoes their factor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.shards import TensorSpec
from ..families.family import Block, Family
from .container import Copy, unchanged

CENTRED_EPSILON = 1e-5  # of OLMo's LayerNorm, which config.json does not say
_LAST_NORM = "model.norm.weight"


@dataclass(frozen=True, kw_only=True)
class FoldedBlock:
    """The changes that turn one checkpoint's layers into Llama's.

    Attributes:
        embedding, residual, logits: factors on embeddings, on what a layer adds, on the logits.
        norm_shift: added to the norms' weights.
        centred: what enters the residual stream loses its mean, and norms get weights of one.
        gate_up: one tensor becomes gate and up projection.
        tied: the source's head is its embeddings.
        untied: the output's head is written out even where it is the source's embeddings.
        embedding_name, head_name: what those are called.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    norm_shift: float = 0.0
    centred: bool = False
    gate_up: bool = False
    tied: bool = False
    untied: bool = False
    embedding_name: str = "model.embed_tokens.weight"
    head_name: str = "lm_head.weight"

    @property
    def ties(self) -> bool:
        """Return whether the output's head is still its embeddings."""
        return self.tied and not self.untied and not self.centred

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of config.json that follow from these changes."""
        return {"tie_word_embeddings": self.ties} | (
            {"rms_norm_eps": CENTRED_EPSILON} if self.centred else {}
        )

    def scaled(self, factor: float) -> "FoldedBlock":
        """Return the same changes with the residual stream scaled by a factor.

        Norms cancel the factor if their epsilon is scaled by its square.
        """
        return replace(self, embedding=self.embedding * factor, residual=self.residual * factor)

    def adds(self, weight: Tensor) -> Tensor:
        """Return rows (D, ...) of a projection into the residual stream, with the changes applied."""
        return (weight - weight.mean(0, keepdim=True) if self.centred else weight) * self.residual

    def copies(self, name: str, spec: TensorSpec) -> dict[str, Copy]:
        """Return the output tensors that are made of one of the source's."""
        if name == self.embedding_name:
            copies = unchanged(name, spec)
            if self.embedding != 1.0 or self.centred:
                copies = _changed(name, spec, self._embed)
            if self.tied and not self.ties:
                head = Copy(source=name, spec=spec, change=lambda weight: weight * self.logits, by_rows=True)
                copies |= {self.head_name: head}
            return copies
        if name == self.head_name:
            if self.tied:
                return {}  # a copy of the embeddings, which the head no longer is
            if self.logits == 1.0:
                return unchanged(name, spec)
            return _changed(name, spec, lambda weight: weight * self.logits)
        if name == _LAST_NORM and self.ties and self.logits != self.embedding:
            factor = self.logits / self.embedding
            return _changed(name, spec, lambda weight: (weight + self.norm_shift) * factor)
        if name.endswith("norm.weight") and self.norm_shift:
            return _changed(name, spec, lambda weight: weight + self.norm_shift)
        if name.endswith(".gate_up_proj.weight") and self.gate_up:
            half = TensorSpec(spec.dtype, (spec.shape[0] // 2, *spec.shape[1:]))
            gate, up = (name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj"))
            return {
                gate: Copy(source=name, spec=half, change=lambda weight: weight.chunk(2)[0]),
                up: Copy(source=name, spec=half, change=lambda weight: weight.chunk(2)[1]),
            }
        if name.endswith(".down_proj.weight") and (self.residual != 1.0 or self.centred):
            added = {name: Copy(source=name, spec=spec, change=self.adds)}
            return added | (self._ones(name, spec) if self.centred else {})
        return unchanged(name, spec)

    def _embed(self, weight: Tensor) -> Tensor:
        return (weight - weight.mean(1, keepdim=True) if self.centred else weight) * self.embedding

    def _ones(self, name: str, spec: TensorSpec) -> dict[str, Copy]:
        """Return the weights of a layer's norms, made next to a matrix (D, ...).

        Those of the last norm are made next to the first layer's.
        """
        norms = [
            name.replace("mlp.down_proj", part) for part in ("input_layernorm", "post_attention_layernorm")
        ]
        norms += [_LAST_NORM] if ".layers.0." in name else []
        width = spec.shape[0]
        made = Copy(source=name, spec=TensorSpec(spec.dtype, (width,)), change=lambda _: torch.ones(width))
        return dict.fromkeys(norms, made)


def _changed(name: str, spec: TensorSpec, change: Callable[[Tensor], Tensor]) -> dict[str, Copy]:
    """Return a tensor of the same name and shape that is changed row by row."""
    return {name: Copy(source=name, spec=spec, change=change, by_rows=True)}


def folded_block(family: Family, config: Mapping[str, Any]) -> FoldedBlock:
    """Return the changes that turn the layers of a checkpoint into Llama's."""
    block = family.block
    assert isinstance(block, Block)

    def factor(field: str | None) -> float:
        return 1.0 if field is None else float(config[field])

    return FoldedBlock(
        embedding=float(config["hidden_size"] ** 0.5) if block.embedding_root else factor(block.embedding),
        residual=factor(block.residual),
        logits=1 / factor(block.logits),
        norm_shift=block.norm_shift,
        centred=block.centred,
        gate_up=block.gate_up,
        tied=bool(config["tie_word_embeddings"]),
        embedding_name=family.prefix + family.embedding,
        head_name=family.head,
    )
