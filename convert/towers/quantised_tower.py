"""Quantised multimodal checkpoints: the tower's stored tensors, and quantization_config in both spellings.

A quantization_config names modules as the multimodal class or its files do. The tower alone has other names,
so its config is made anew from what its tensors are.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ...checkpoints.directory import Checkpoint
from ...checkpoints.quantised.compressed import fitting_groups
from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from ...checkpoints.quantised.packed_tensor import module_of
from ...checkpoints.quantised.schemes import LISTS, MODELOPT_FILE, SCHEMES
from ...checkpoints.quantised.unconverted import OutputModules
from ...core.errors import InvalidInput
from ...core.untrusted import read_json


def stored_names(whole: Checkpoint, names: Mapping[str, str]) -> dict[str, str]:
    """Return a tower's tensors as they are stored: for each its name in the causal language model.

    `names` has those of the unquantised tensors, in the whole checkpoint and there, as in all of this module.
    """
    if not isinstance(whole, QuantisedCheckpoint):
        return dict(names)
    return {
        part: module_of(ours) + part.removeprefix(module_of(name)) if name in whole.packed else ours
        for name, ours in names.items()
        for part in whole.parts(name)
    }


def tower_quantization(whole: Checkpoint, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the quantization_config of a tower alone, as a field of config.json; nothing without any."""
    if not isinstance(whole, QuantisedCheckpoint) or not whole.is_named_in_config:
        return {}
    found = _of_tower(whole, names, whole.quantization)
    return {} if found is None else {"quantization_config": found}


def tower_modelopt_file(whole: Checkpoint, names: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the content of hf_quant_config.json of a tower alone; None where it has none."""
    file = whole.directory / MODELOPT_FILE
    if not file.is_file() or not isinstance(whole, QuantisedCheckpoint):
        return None
    return _of_tower(whole, names, read_json(file))


def _of_tower(
    whole: QuantisedCheckpoint, names: Mapping[str, str], quantization: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a configuration of quantised weights with the names of a tower alone; None where it has none."""
    packed = {name: ours for name, ours in names.items() if name in whole.packed}
    if not packed:
        return None
    config = _without_names(quantization)
    if isinstance(config.get("quantization"), dict):
        config["quantization"] = _without_names(config["quantization"])
    if whole.method == "compressed-tensors" and "config_groups" in config:
        config["config_groups"] = _tower_groups(whole, packed)
    plain = tuple(
        module_of(ours)
        for name, ours in names.items()
        if name not in packed and "embed" not in ours and name.endswith(".weight")
        if len(whole.spec(name).shape) == 2
    )
    modules_of_tower = OutputModules(plain=plain, packed=tuple(map(module_of, packed.values())), gone=())
    return SCHEMES[whole.method].unconverted(config, modules_of_tower)


def _without_names(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: [] if key in LISTS and value else value for key, value in config.items()}


def _tower_groups(whole: QuantisedCheckpoint, packed: Mapping[str, str]) -> dict[str, Any]:
    """Return the config groups of compressed-tensors with the tower's own names as targets.

    Groups whose targets are classes, such as Linear, stay. Otherwise each module goes to the group that its
    numbers and scales fit, and groups without any are left out.
    """
    groups: dict[str, Any] = whole.quantization["config_groups"]
    if all(_is_of_classes(group.get("targets")) for group in groups.values()):
        return groups
    specs = {name: whole.stored.spec(name) for name in whole.stored}
    alike = {label: {**group, "targets": None} for label, group in groups.items()}
    named: dict[str, list[str]] = {}
    for name, ours in packed.items():
        fitting = fitting_groups(specs, name, whole.packed[name].shape, groups)
        if not fitting or any(alike[label] != alike[fitting[0]] for label in fitting):
            raise InvalidInput(
                f"{name} of {whole.directory} fits {'several' if fitting else 'no'} config_groups of its "
                "quantization_config, so kvfold cannot tell how the text tower is quantised; fold the "
                "checkpoint that it was made from, and quantise the result"
            )
        named.setdefault(fitting[0], []).append(module_of(ours))
    return {label: {**groups[label], "targets": modules} for label, modules in named.items()}


def _is_of_classes(targets: Any) -> bool:
    """Return whether targets are names of classes, and not of modules or patterns of them."""
    if not isinstance(targets, list):
        return False
    return all(isinstance(each, str) and each.isidentifier() for each in targets)


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
        named: its unquantised tensors by their names in the whole checkpoint.
        place: for each of its modules the name in the multimodal class.
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
