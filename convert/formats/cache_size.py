"""The size of the cache before and after a fold, in total and by kind of layer."""

from typing import Any

import torch

from ...core.errors import InvalidInput
from ..families.source import Source
from .container import Container


def cache_size(source: Source, container: Container, dtype: torch.dtype) -> dict[str, Any]:
    """Return the size of the cache per token, before and after, as `Plan.cache` does.

    Args:
        source: the checkpoint.
        container: the output format.
        dtype: of the output, in which bytes are counted.
    """
    before = [source.shape(layer).geometry.cache_elements for layer in source.attending]
    after = [container.elements(layer) for layer in source.attending]

    def size(elements: list[int]) -> dict[str, int | float]:
        mean = sum(elements) / len(elements)
        return {
            "elements_per_token_per_layer": int(mean) if mean.is_integer() else mean,
            "bytes_per_token": sum(elements) * dtype.itemsize,
        }

    more: dict[str, Any] = {"layers": source.kinds} if source.kinds else {}
    if source.family.unlike:
        kinds: dict[str, dict[str, int]] = {}
        for layer, old, new in zip(source.attending, before, after, strict=True):
            name = str(source.config["layer_types"][layer])
            kinds.setdefault(name, {"layers": 0, "before": old, "after": new})["layers"] += 1
        more["kinds"] = kinds
    return {"before": size(before), "after": size(after), "ratio": sum(after) / sum(before), **more}


def check_prepared_values(source: Source, cache_dtype: str) -> None:
    """Refuse to prepare values for a quantised cache where no weight can.

    Args:
        source: the checkpoint.
        cache_dtype: format of the cache.

    Raises:
        InvalidInput: a norm stands between its values and the cache.
    """
    if source.family.value_norm and cache_dtype != "bfloat16":
        raise InvalidInput(
            f"--cache-dtype {cache_dtype} does not apply to {source.family.label}, whose values are "
            "normalised before they are cached, so that no weight prepares them; leave it out"
        )
