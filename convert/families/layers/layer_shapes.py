"""The shape of each layer's attention, where layers are unlike: widths of heads, their counts, shared caches.

In Gemma 4 the layers that read all positions have wider heads than those with a window. They may have fewer
key/value heads, and use their keys as values. The last layers may have no keys and values of their own: each
reads those of the last layer of its kind that has some.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....core.errors import InvalidInput
from ....core.untrusted import shorten
from ...algebra.target import Geometry
from ..config_fields import LARGEST, is_size
from ..family import Family
from .layer_kinds import ATTENTION

_BY_LAYER = "per_layer_config"
_HEADS, _WIDTH = "num_key_value_heads", "head_dim"
_GLOBAL_HEADS, _GLOBAL_WIDTH = "num_global_key_value_heads", "global_head_dim"


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer's attention.

    Attributes:
        family: the row of this layer: without the projections and norms that it has not.
        geometry: its heads.
        rotary_width: how many of a head's dimensions rotate.
    """

    family: Family
    geometry: Geometry
    rotary_width: int

    def folded(self, share: tuple[int, int]) -> Geometry:
        """Return the shape with fewer key/value heads.

        Args:
            share: of the heads that stay, as a fraction; at least one head does.

        Raises:
            InvalidInput: the heads do not divide so.
        """
        heads = self.geometry.num_key_value_heads
        least, of = share
        if heads * least < of:
            return replace(self.geometry, num_key_value_heads=1)
        kept, rest = divmod(heads * least, of)
        if rest or heads % kept:
            raise InvalidInput(
                f"{heads} key/value heads of some layers do not fold by the same factor as {of} into "
                f"{least}; choose another number of heads"
            )
        return replace(self.geometry, num_key_value_heads=kept)


def overrides(config: Mapping[str, Any], layers: int) -> dict[int, dict[str, int]]:
    """Return the head width and key/value heads of the layers that differ from config.json's first level.

    transformers writes them as per_layer_config; before 5.23 they were global_head_dim and
    num_global_key_value_heads.
    """
    stated = config.get(_BY_LAYER)
    if stated is None:
        wide = {_WIDTH: config.get(_GLOBAL_WIDTH, 512)}
        if config.get("attention_k_eq_v") and config.get(_GLOBAL_HEADS) is not None:
            wide[_HEADS] = config[_GLOBAL_HEADS]
        kinds = config.get("layer_types") or []
        stated = {layer: wide for layer in range(layers) if layer < len(kinds) and kinds[layer] == ATTENTION}
    found: dict[int, dict[str, int]] = {}
    for name, values in stated.items():
        for field, value in values.items():
            if field not in {_HEADS, _WIDTH} or not is_size(value):
                raise InvalidInput(
                    f"config.json has {_BY_LAYER}.{name}.{shorten(field)} {shorten(value)}; kvfold reads "
                    f"{_HEADS} and {_WIDTH} there, from 1 to {LARGEST}"
                )
        found[int(name)] = dict(values)
    return found


def with_fewer_heads(config: Mapping[str, Any], share: tuple[int, int]) -> dict[str, Any]:
    """Return a config.json whose layers with heads of their own keep a share of them, a fraction, too."""

    def fewer(heads: int) -> int:
        return max(1, heads * share[0] // share[1])

    made = dict(config)
    if made.get(_GLOBAL_HEADS) is not None:
        made[_GLOBAL_HEADS] = fewer(made[_GLOBAL_HEADS])
    if made.get(_BY_LAYER) is not None:
        made[_BY_LAYER] = {
            layer: {**own, **({_HEADS: fewer(own[_HEADS])} if _HEADS in own else {})}
            for layer, own in made[_BY_LAYER].items()
        }
    return made


def own_geometry(family: Family, config: Mapping[str, Any], geometry: Geometry, layer: int) -> Geometry:
    """Return the heads of a layer."""
    if not family.unlike:
        return geometry
    own = config[_BY_LAYER].get(layer, {})
    heads, width = own.get(_HEADS, geometry.num_key_value_heads), own.get(_WIDTH, geometry.head_dim)
    if geometry.num_attention_heads % heads or width % 2:
        raise InvalidInput(
            f"config.json is inconsistent: layer {layer} has {geometry.num_attention_heads} query heads, "
            f"{heads} key/value heads and a head_dim of {width}, which must divide and be even"
        )
    return replace(geometry, num_key_value_heads=heads, head_dim=width)


def own_row(family: Family, config: Mapping[str, Any], layer: int) -> Family:
    """Return the row of one layer, without what the layer has not."""
    if donor_of(family, config, layer) is not None:
        return replace(family, k=None, v=None, k_norm=None)
    if family.key_values is None or not config.get(family.key_values):
        return family
    kinds = config["layer_types"]
    return replace(family, v=None) if kinds[layer] == ATTENTION else family


def donor_of(family: Family, config: Mapping[str, Any], layer: int) -> int | None:
    """Return the layer whose keys and values a layer reads; None where it has its own."""
    first = first_follower(family, config)
    if layer < first:
        return None
    kinds = config["layer_types"]
    earlier = [number for number in range(first) if kinds[number] == kinds[layer]]
    if not earlier:
        raise InvalidInput(
            f"config.json has {family.followers} {config[str(family.followers)]}, but no layer below {first} "
            f"has keys and values of the kind {kinds[layer]}"
        )
    return earlier[-1]


def first_follower(family: Family, config: Mapping[str, Any]) -> int:
    """Return the number of the first layer without keys and values of its own; all layers where each has."""
    layers = int(config["num_hidden_layers"])
    count = 0 if family.followers is None else config.get(family.followers) or 0
    if not isinstance(count, int) or not 0 <= count < layers:
        raise InvalidInput(
            f"config.json has {family.followers} {shorten(count)}, where a number from 0 to {layers - 1} is "
            "needed"
        )
    return layers - count
