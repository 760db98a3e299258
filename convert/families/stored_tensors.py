"""The tensors that a checkpoint of a family should have, and a check of those of its attention."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from ...checkpoints.directory import Checkpoint
from ...core.errors import InvalidInput
from .family import Family
from .layers.layer_shapes import LayerShape
from .packing import outputs, shapes


def names_outside_attention(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Return the names of a whole checkpoint's tensors apart from attention; the config is complete."""
    names = [
        family.prefix + name.format(layer=n)
        for n in range(config["num_hidden_layers"])
        for name in family.layer_tensors
    ]
    names += [family.prefix + name for name in (family.embedding, *family.model_tensors)]
    return names + ([] if config["tie_word_embeddings"] else [family.head])


def biases_of(checkpoint: Checkpoint, family: Family, layers: Mapping[int, LayerShape]) -> frozenset[str]:
    """Return the roles with a bias, after checking every layer's tensors and shapes against config.json."""
    first = min(layers)
    biases = frozenset(
        role for role, name in family.projections(first).items() if f"{name}.bias" in checkpoint
    )
    for layer, own in layers.items():
        for tensor, shape in attention_shapes(own, layer, biases):
            if tensor not in checkpoint:
                raise checkpoint.absence(tensor, f"a {family.label} checkpoint")
            if checkpoint.spec(tensor).shape != shape:
                raise InvalidInput(
                    f"{tensor} of {checkpoint.directory} has shape {checkpoint.spec(tensor).shape}, but "
                    f"config.json implies {shape}; correct config.json, or save the checkpoint again"
                )
        for role, name in own.family.projections(layer).items():
            if role not in biases and f"{name}.bias" in checkpoint:
                raise InvalidInput(
                    f"{checkpoint.directory} has {name}.bias, but layer {first} has none; all layers must "
                    "have the same biases"
                )
    return biases


def attention_shapes(
    layer: LayerShape, number: int, biases: Set[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the names of a layer's attention tensors, and the shapes that they should have."""
    family, geometry = layer.family, layer.geometry
    weights = shapes(family, geometry)
    rows = outputs(family, geometry)
    for role, name in family.projections(number).items():
        yield f"{name}.weight", weights[role]
        if role in biases:
            yield f"{name}.bias", (rows[role],)
    counts = {"q": geometry.num_attention_heads, "k": geometry.num_key_value_heads}
    for which in ("q", "k"):
        norm = family.norm(which, number)
        if norm is not None:
            yield norm, (geometry.head_dim * (counts[which] if family.norm_spans == "heads" else 1),)
