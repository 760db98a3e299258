"""Settings of peers' own code at a share of the cache: what `benchmarks.peers --sweep` tries.

Each adapter of peer_process.py has settings to begin with, and TransMLA's and CARE's have further ones around
the best of these.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kvfold.convert.algebra.target import Geometry
from kvfold.core.errors import InvalidInput

Settings = dict[str, Any]
Best = Callable[[], Settings]  # the best settings so far
CARE_RULES = ("care", "no-sqrt-care", "transmla-care")
FURTHEST = 8.0  # by how much keys may be larger or smaller next to values; as published 1


def first_settings(adapter: str, geometry: Geometry, elements: int) -> list[Settings]:
    """Return the settings that a sweep begins with.

    Args:
        adapter: of `SWEEPS`.
        geometry: of the source.
        elements: cached per token and layer.

    Raises:
        InvalidInput: the adapter has no sweep.
    """
    if adapter not in SWEEPS:
        raise InvalidInput(f"--sweep has no settings for {adapter!r}; choose from {', '.join(SWEEPS)}")
    return list(SWEEPS[adapter](geometry, elements))


def _transmla(geometry: Geometry, elements: int) -> Iterator[Settings]:
    """Rotary widths of all of a head, half and a quarter; as many pairs are folded as the width needs."""
    for collapse in (1, 2, 4):
        width = geometry.head_dim // collapse
        if width % 2 == 0 and 0 < width < elements:
            yield {"qk_mqa_dim": width, "kv_lora_rank": elements - width, "freqfold": collapse}


def _care(geometry: Geometry, elements: int) -> Iterator[Settings]:
    """The widths of `transmla` with every decomposition."""
    for rule in CARE_RULES:
        for settings in _transmla(geometry, elements):
            yield {**settings, "kv_decomp_method": rule}


def _mha2mla(geometry: Geometry, elements: int) -> Iterator[Settings]:
    """A quarter, half and three quarters for rotary pairs, with every choice of these and decomposition."""
    head, each = geometry.head_dim, elements // geometry.num_key_value_heads
    widths = {each * share // 8 * 2 for share in (1, 2, 3)}
    for width in sorted(width for width in widths if 0 < width <= head and width < each):
        for version in ("high", "low", "uniform", "2-norm"):
            if version == "uniform" and (head // 2) % (head // width):
                continue  # the published code refuses it
            for method, shares in (("joint", 1), ("split", 2)):
                rank, rest = divmod(each - width, shares)
                if not rest:
                    yield {
                        "partial_rope_version": version,
                        "rope_dim_for_mla": width,
                        "low_rank": rank,
                        "svd_init_method": method,
                    }


def _xecomla(geometry: Geometry, elements: int) -> Iterator[Settings]:
    """Rotary widths of a quarter to all of a head, of which the code does not raise the rank."""
    for share in (1, 2, 3, 4):
        width = geometry.head_dim * share // 8 * 2
        if 0 < width < elements and (elements - width) % 8 == 0:
            yield {"qk_rope_head_dim": width, "kv_lora_rank": elements - width}


def _folds(geometry: Geometry, best: Best) -> Iterator[Settings]:
    """Two, four and eight times as many pairs that share a decomposition (FreqFold)."""
    start = best()
    for multiple in (2, 4, 8):
        fold = start["freqfold"] * multiple
        if fold <= geometry.head_dim // 2:
            yield {**start, "freqfold": fold}


def _balances(geometry: Geometry, best: Best) -> Iterator[Settings]:
    """Smaller and larger keys next to values, as long as that gains."""
    start = best()
    for step in (0.5, 2.0):
        weight = step
        while 1 / FURTHEST <= weight <= FURTHEST:
            settings = {**start, "balance_kv_ratio": weight}
            yield settings
            if best() != settings:
                break
            weight *= step


SWEEPS: dict[str, Callable[[Geometry, int], Iterator[Settings]]] = {
    "transmla": _transmla,
    "care": _care,
    "mha2mla": _mha2mla,
    "xecomla": _xecomla,
}
Further = Callable[[Geometry, Best], Iterator[Settings]]  # asks for the best again after each that it yields
FURTHER: dict[str, tuple[Further, ...]] = {"transmla": (_folds, _balances), "care": (_folds, _balances)}
