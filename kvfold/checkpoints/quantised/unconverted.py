"""The lists of unconverted modules in a quantization_config, in the spelling of each scheme.

A loader quantises every linear module that the list does not name. So the list of an output names every
module whose weight the output holds unquantised.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OutputModules:
    """The modules of an output that has quantised weights.

    Attributes:
        plain: those with an unquantised matrix, in order.
        packed: those with a quantised one.
        gone: modules of the source that the output does not have.
    """

    plain: tuple[str, ...]
    packed: tuple[str, ...]
    gone: Collection[str]


Spelling = Callable[[Config, OutputModules], Config]


def in_list(*fields: str) -> Spelling:
    """Return the spelling of schemes that list names, in the first field that a config has, or the first."""

    def spell(config: Config, modules: OutputModules) -> Config:
        field = next((name for name in fields if config.get(name) is not None), fields[0])
        kept = [name for name in config.get(field) or [] if name not in modules.gone]
        added = [name for name in modules.plain if name not in kept]
        return {**config, field: kept + added}

    return spell


def in_patterns(config: Config, modules: OutputModules) -> Config:
    """Spell GPTQ's lists: patterns of `dynamic` that exclude, and the quantised modules of a layer."""
    patterns = dict(config.get("dynamic") or {})
    for name in modules.plain:
        patterns.setdefault(f"-:{_pattern(name, modules.packed)}", {})
    inside = dict.fromkeys(
        found[1] for name in modules.packed if (found := re.search(r"\.\d+\.(.+)$", name)) is not None
    )
    return {**config, "dynamic": patterns, "modules_in_block_to_quantize": [list(inside)]}


def _pattern(name: str, packed: Collection[str]) -> str:
    """Return a regular expression for a module, in all layers unless it is quantised in one."""
    everywhere = re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name), count=1)
    if any(re.fullmatch(everywhere, other) for other in packed):
        everywhere = re.escape(name)
    return f"^{everywhere}$"


def in_modelopt(config: Config, modules: OutputModules) -> Config:
    """Spell ModelOpt's list, which has another name in each of its two files."""
    if isinstance(config.get("quantization"), Mapping):
        inner = in_list("exclude_modules")(dict(config["quantization"]), modules)
        return {**config, "quantization": {**inner, "kv_cache_quant_algo": None}}
    return without_cache_scheme(in_list("ignore", "exclude_modules")(config, modules))


def in_compressed(config: Config, modules: OutputModules) -> Config:
    """Spell the list of compressed-tensors."""
    return without_cache_scheme(in_list("ignore")(config, modules))


def without_cache_scheme(config: Config) -> Config:
    """Return a config without scales of the cache, which were those of the source's keys and values."""
    if config.get("kv_cache_scheme") is not None:
        return {**config, "kv_cache_scheme": None}
    return config
