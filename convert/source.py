"""A checkpoint seen as layers of attention: which tensors belong to a layer, and what they say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention import Attention
from .checkpoint import Checkpoint
from .errors import InvalidInput
from .families import Family, family_of, geometry_of
from .rotary import frequencies, rope_parameters
from .target import Geometry


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of a known family whose attention tensors are there and have the shapes that config.json says.

    Attributes:
        checkpoint: the directory.
        config: its config.json, with the family's defaults where it says nothing.
        family, geometry: what it is.
        biases: the roles (of q, k, v, o) that have one.
    """

    checkpoint: Checkpoint
    config: dict[str, Any]
    family: Family
    geometry: Geometry
    biases: frozenset[str]

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return int(self.config["num_hidden_layers"])

    @property
    def positions(self) -> int:
        """max_position_embeddings."""
        return int(self.config["max_position_embeddings"])

    def frequencies(self) -> tuple[Tensor, float]:
        """Angular frequencies (F,) of a head's rotary pairs, and the factor on their cosines and sines.

        Raises:
            InvalidInput: they depend on the length of the input.
        """
        return frequencies(rope_parameters(self.config), self.geometry.head_dim, self.positions)

    def reads(self, layer: int) -> tuple[str, ...]:
        """The tensors of a layer's attention."""
        names = [f"{name}.{part}" for name in self.family.projections(layer).values() for part in ("weight", "bias")]
        return tuple(name for name in names if name in self.checkpoint)

    def attention(self, layer: int, rotary_factor: float = 1.0) -> Attention:
        """A layer's attention, float64.

        Args:
            layer: its number.
            rotary_factor: factor on the cosines and sines, which goes into the scale.
        """
        head_dim = self.geometry.head_dim
        tensors = {name: self.checkpoint[name].to(torch.float64) for name in self.reads(layer)}

        def read(role: str, part: str) -> Any:
            return tensors.get(f"{self.family.projections(layer)[role]}.{part}")

        def heads(tensor: Any) -> Any:
            return None if tensor is None else tensor.unflatten(0, (-1, head_dim))

        return Attention(
            q_NHD=heads(read("q", "weight")),
            k_KHD=heads(read("k", "weight")),
            v_KHD=heads(read("v", "weight")),
            o_DNH=read("o", "weight").unflatten(1, (-1, head_dim)),
            q_NH=heads(read("q", "bias")),
            k_KH=heads(read("k", "bias")),
            v_KH=heads(read("v", "bias")),
            o_D=read("o", "bias"),
            scale=head_dim**-0.5 * rotary_factor**2,
        )


def open_source(directory: Path) -> Source:
    """The checkpoint in a directory.

    Raises:
        InvalidInput: it cannot be folded.
    """
    if (directory / "kvfold.json").exists():
        raise InvalidInput(f"{directory} is already converted by kvfold; convert the source named in its kvfold.json instead")
    checkpoint = Checkpoint(directory)
    family = family_of(checkpoint.config)
    config = {**family.defaults, **checkpoint.config}
    geometry = geometry_of(config)
    biases = _biases(checkpoint, family, geometry, config["num_hidden_layers"])
    _check_whole(checkpoint, family, config)
    return Source(checkpoint=checkpoint, config=config, family=family, geometry=geometry, biases=biases)


def _check_whole(checkpoint: Checkpoint, family: Family, config: dict[str, Any]) -> None:
    """Everything beside the attention is there: transformers would fill a gap with random numbers."""
    wanted = [name.format(layer=n) for n in range(config["num_hidden_layers"]) for name in family.layer_tensors]
    wanted += [*family.model_tensors, *([] if config["tie_word_embeddings"] else [family.head])]
    for name in wanted:
        if name not in checkpoint:
            raise InvalidInput(f"{checkpoint.directory} has no {name}, which a {family.label} checkpoint has")


def _biases(checkpoint: Checkpoint, family: Family, geometry: Geometry, layers: int) -> frozenset[str]:
    """The roles with a bias, after checking that every layer's projections are there and have the shape config.json says."""
    query, key = geometry.num_attention_heads * geometry.head_dim, geometry.num_key_value_heads * geometry.head_dim
    hidden = geometry.hidden_size
    shapes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    biases = frozenset(role for role, name in family.projections(0).items() if f"{name}.bias" in checkpoint)
    for layer in range(layers):
        for role, name in family.projections(layer).items():
            wanted = {f"{name}.weight": shapes[role]} | ({f"{name}.bias": shapes[role][:1]} if role in biases else {})
            for tensor, shape in wanted.items():
                if tensor not in checkpoint:
                    raise InvalidInput(f"{checkpoint.directory} has no {tensor}, which a {family.label} checkpoint has")
                if checkpoint.spec(tensor).shape != shape:
                    raise InvalidInput(f"{tensor} has shape {checkpoint.spec(tensor).shape}, but config.json implies {shape}")
            if role not in biases and f"{name}.bias" in checkpoint:
                raise InvalidInput(f"{checkpoint.directory} has {name}.bias, but layer 0 has none; layers must be alike")
    return biases
