"""Quantised multimodal checkpoints: the tower's stored tensors, and quantization_config in both spellings.

A quantization_config names modules as the multimodal class or its files do. The tower alone has other names,
so its config is made anew from what its tensors are.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...checkpoints.directory import Checkpoint
from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from ...checkpoints.quantised.packed_tensor import module_of
from ...checkpoints.quantised.schemes import SCHEMES
from ...checkpoints.quantised.unconverted import OutputModules

_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


def stored_names(whole: Checkpoint, names: Mapping[str, str]) -> dict[str, str]:
    """Return a tower's tensors as they are stored: for each its name in the causal language model.

    Args:
        whole: the multimodal checkpoint.
        names: of the unquantised tensors, there and in the causal language model.
    """
    if not isinstance(whole, QuantisedCheckpoint):
        return dict(names)
    return {
        part: module_of(ours) + part.removeprefix(module_of(name)) if name in whole.packed else ours
        for name, ours in names.items()
        for part in whole.parts(name)
    }


def tower_quantization(whole: Checkpoint, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the quantization_config of a tower alone, as a field of config.json; nothing without any.

    Args:
        whole: the multimodal checkpoint.
        names: of the tower's unquantised tensors, there and in the causal language model.
    """
    if not isinstance(whole, QuantisedCheckpoint):
        return {}
    packed = {name: ours for name, ours in names.items() if name in whole.packed}
    if not packed:
        return {}
    config = {key: [] if key in _LISTS and value else value for key, value in whole.quantization.items()}
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        modules = {module_of(name): module_of(ours) for name, ours in packed.items()}
        config["config_groups"] = {name: _with_targets(group, modules) for name, group in groups.items()}
    plain = tuple(
        module_of(ours)
        for name, ours in names.items()
        if name not in packed and _is_linear(whole, name) and "embed" not in ours
    )
    modules_of_tower = OutputModules(plain=plain, packed=tuple(map(module_of, packed.values())), gone=())
    return {"quantization_config": SCHEMES[whole.method].unconverted(config, modules_of_tower)}


def _is_linear(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and len(checkpoint.spec(name).shape) == 2


def _with_targets(group: dict[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
    """Return a config group of compressed-tensors whose targets name the tower's modules by its own names.

    Targets that are classes stay.
    """
    targets = group.get("targets")
    if not isinstance(targets, list) or not any(_names_modules(target) for target in targets):
        return group
    named = [
        ours
        for name, ours in modules.items()
        if any(_names_modules(target) and _matches(target, name) for target in targets)
    ]
    classes = [target for target in targets if not _names_modules(target)]
    return {**group, "targets": [*classes, *named]}


def _names_modules(target: Any) -> bool:
    return isinstance(target, str) and (target.startswith("re:") or "." in target)


def _matches(target: str, name: str) -> bool:
    """Return whether a target names a module; a class may have it at another place than the files."""
    if not target.startswith("re:"):
        return name == target or name.endswith(f".{target}") or target.endswith(f".{name}")
    pattern = target.removeprefix("re:")
    try:
        return re.match(pattern, name) is not None or re.match(pattern, f"model.{name}") is not None
    except re.error:
        return False


def whole_modules(
    whole: QuantisedCheckpoint,
    part: Checkpoint,
    named: Mapping[str, str],
    place: Mapping[str, str],
    inside: Iterable[str],
) -> OutputModules | None:
    """Return the modules of a whole output with quantised weights; None where no weight is quantised.

    Args:
        whole: the source.
        part: the folded tower.
        named: the folded tower's unquantised tensors by their names in the whole checkpoint.
        place: for each of the folded tower's modules its name in the multimodal class.
        inside: names of the source's tower in the whole checkpoint.
    """
    packed_part = part.packed if isinstance(part, QuantisedCheckpoint) else {}
    kept = [name for name in whole.packed if name not in set(inside)]
    kept += [name for name, ours in named.items() if ours in packed_part]
    if not kept:
        return None
    plain: dict[str, None] = {}
    for name, ours in named.items():
        is_new = ours not in packed_part and (name in whole.packed or name not in whole)
        if is_new and name.endswith(".weight") and len(part.spec(ours).shape) > 1:
            plain |= dict.fromkeys((module_of(name), place[module_of(ours)]))
    gone = {module_of(name) for name in inside if name not in named}
    return OutputModules(plain=tuple(plain), packed=tuple(map(module_of, kept)), gone=gone)
