"""The tensors that a written checkpoint must hold, from its config.json.

Engines fill tensors that are absent with random numbers.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...convert.algebra.target import Geometry, LatentTarget
from ...convert.families.family import Family
from ...convert.families.latent_layout import latent_shapes
from ...convert.families.packing import attention_shapes
from ...convert.families.recognition import attending, complete, configured, geometry_of
from ...convert.families.rows import FAMILIES
from ...convert.families.source import shape_of
from ...convert.formats.remote import Remote

Shape = tuple[int, ...] | None


def expected_tensors(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Shape]:
    """Return names and shapes of the tensors that config.json promises.

    They are those of attention, the embeddings and the head, whose shapes are None.

    Args:
        config: of the output.
        names: of the tensors that are there: biases that the config does not speak of are expected as in
            layer 0.

    A class that kvfold has no row for promises nothing here.
    """
    kind = config.get("model_type")
    if kind == "deepseek_v3":
        layers = range(config["num_hidden_layers"])
        shapes = latent_shapes(config)
        attention: dict[str, Shape] = {
            f"model.layers.{n}.self_attn.{name}": shape for n in layers for name, shape in shapes.items()
        }
        return attention | _ends(FAMILIES["llama"], {"tie_word_embeddings": False, **config})
    if kind == "kvfold":
        return _remote(config)
    if kind not in FAMILIES:
        return {}
    family = FAMILIES[kind]
    return _latent(family, config) if family.latent else _grouped(family, config, names)


def _latent(family: Family, config: Mapping[str, Any]) -> dict[str, Shape]:
    whole = complete(family, config)
    shapes = _ends(family, whole)
    for layer in attending(family, whole):
        place = family.projections(layer)["o"].removesuffix("o_proj")
        shapes |= {place + name: shape for name, shape in latent_shapes(whole).items()}
    return shapes


def _remote(config: Mapping[str, Any]) -> dict[str, Shape]:
    ours = config["kvfold"]
    family = FAMILIES[ours["source_model_type"]]
    place = ours["attention"]
    own = family.o.rpartition(".")[0]
    family = replace(family, prefix=place.removesuffix(own))
    whole = complete(family, {**config, "model_type": ours["source_model_type"]})
    family = configured(family, whole)
    intact = ours["form"] == "intact"
    heads, width = whole["num_attention_heads"], config["v_head_dim"]
    container = Remote(
        family=family,
        geometry=Geometry(
            hidden_size=whole["hidden_size"],
            num_attention_heads=heads,
            num_key_value_heads=ours.get("key_heads", heads),
            head_dim=width,
        ),
        target=LatentTarget(
            kv_lora_rank=config["latent_rank" if intact else "kv_lora_rank"],
            qk_rope_head_dim=0 if intact else config["qk_rope_head_dim"],
            rope=ours["form"],
            q_lora_rank=config.get("q_lora_rank"),
        ),
        frequencies=(),
        scale=ours["scale"],
        nope_width=0 if intact else config["qk_nope_head_dim"],
        biases=frozenset("k" if role == "kv" else role for role in ours["biases"]),
    )
    shapes = _ends(family, whole)
    for layer in attending(family, whole):
        shapes |= {name: spec.shape for name, spec in container.specs(layer, torch.float32).items()}
    return shapes


def _grouped(family: Family, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Shape]:
    if family.prefix + family.embedding not in names and family.embedding in names:
        family = replace(family, prefix="")
    whole = complete(family, config)
    family = configured(family, whole)
    geometry = geometry_of(whole)
    layers = attending(family, whole) if family.mixers else tuple(range(whole["num_hidden_layers"]))
    first = family.projections(layers[0]) if layers else {}
    biases = {role for role, name in first.items() if f"{name}.bias" in names}
    shapes = _ends(family, whole)
    for layer in layers:
        shapes |= dict(attention_shapes(shape_of(family, whole, geometry, layer), layer, biases))
    return shapes


def _ends(family: Family, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the embeddings and the head; what else is missing shows when a checkpoint is loaded."""
    names = [family.prefix + family.embedding]
    return dict.fromkeys(names if config["tie_word_embeddings"] else [*names, family.head])
