"""Config groups of a quantised text tower: by what its tensors are, since patterns of a stranger are not run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.convert.towers.tower import find_tower
from kvfold.core.errors import InvalidInput

from ...support.quantised import quantise, quantised_tower
from ...support.towers import make_multimodal

HALF = {"calibration": "none", "verify": "none"}
GROUP = "group_0"


@pytest.fixture(scope="module")
def make_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a class, a format and changes of its quantization_config to a source."""
    root = tmp_path_factory.mktemp("targets")

    def give(name: str, kind: str = "llava", **changes: Any) -> Path:
        if not (root / kind).exists():
            make_multimodal(root / kind, kind, intermediate_size=64)
        source = quantise(root / kind, root / str(len([*root.iterdir()])), quantised_tower(name))
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] |= changes
        (source / "config.json").write_text(json.dumps(config))
        return source

    return give


def groups_of(directory: Path, *targets: Any) -> dict[str, Any]:
    """The config group of a source with other targets."""
    (group,) = json.loads((directory / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    return {GROUP: {**group, "targets": [*targets]}}


def tower_groups(source: Path) -> Any:
    tower = find_tower(source)
    return tower.config["quantization_config"]["config_groups"]


@pytest.mark.parametrize("target", [
    r"re:^model\.language_model\.layers\..*_proj$",  # the class's names, where the files have others
    r"re:(\w*\.?)*!",  # takes for ever on any name
    "re:a{99999999999999999999}",
    "re:" + "(" * 5000 + ")" * 5000,
    7,
])  # fmt: skip
def test_targets_become_the_towers_quantised_modules(target: Any, make_source: Callable[..., Path]) -> None:
    source = make_source("compressed fp8", "qwen2_5_vl")
    source = make_source("compressed fp8", "qwen2_5_vl", config_groups=groups_of(source, target))
    tower = find_tower(source)
    found = tower_groups(source)
    wanted = {ours.removesuffix(".weight_scale") for ours in tower.stored.values() if ours.endswith("_scale")}
    assert found.keys() == {GROUP}
    assert set(found[GROUP]["targets"]) == wanted
    assert len(wanted) >= 14


def test_targets_that_are_classes_stay(make_source: Callable[..., Path]) -> None:
    source = make_source("compressed fp8")
    assert tower_groups(source) == groups_of(source, "Linear")


def test_each_module_goes_to_the_group_that_its_numbers_fit(make_source: Callable[..., Path]) -> None:
    eight, four = (make_source(name) for name in ("compressed int8", "compressed int4"))
    both = {"eight": groups_of(eight, "re:.*attn.*")[GROUP], "four": groups_of(four, "re:.*mlp.*")[GROUP]}
    found = tower_groups(make_source("compressed int4", config_groups=both))
    assert found.keys() == {"four"}
    assert "model.layers.1.mlp.up_proj" in found["four"]["targets"]
    again = {**both, "other": {**both["four"], "input_activations": {"num_bits": 8}}}
    with pytest.raises(InvalidInput, match="fits several config_groups"):
        find_tower(make_source("compressed int4", config_groups=again))
    with pytest.raises(InvalidInput, match="fits no config_groups"):
        find_tower(make_source("compressed fp8", config_groups={"g": groups_of(eight, "re:.*")[GROUP]}))


@pytest.mark.parametrize("groups", [{"a": 1}, [1], {"a": None}])
def test_groups_of_other_methods_are_not_read(groups: Any, make_source: Callable[..., Path]) -> None:
    tower = find_tower(make_source("fp8 blocks", config_groups=groups))
    assert tower.config["quantization_config"]["quant_method"] == "fp8"


def test_a_folded_checkpoint_is_not_folded_again(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source("fp8 blocks")
    kvfold.fold(source, kvfold.GQA(kv_heads=2), out=tmp_path / "out", **HALF)
    with pytest.raises(InvalidInput, match="is already folded by kvfold"):
        kvfold.fold(tmp_path / "out", kvfold.GQA(kv_heads=1), out=tmp_path / "again", **HALF)
    with pytest.raises(InvalidInput, match="is already folded by kvfold"):
        kvfold.plan(tmp_path / "out")


def test_a_class_that_writes_no_text_is_refused_before_any_work(
    make_source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source("fp8 blocks")
    monkeypatch.setattr("kvfold.convert.towers.text_class.multimodal_class", lambda config: None)
    monkeypatch.setattr("kvfold.tower_run.put_back", None, raising=False)
    with pytest.raises(InvalidInput, match="transformers has no class of it that writes text"):
        kvfold.fold(source, kvfold.GQA(kv_heads=2), out=tmp_path / "out", **HALF)
    assert [*tmp_path.iterdir()] == []


def test_quantised_towers_need_quantised_checkpoints(
    make_source: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_source("fp8 blocks")
    kvfold.fold(source, kvfold.GQA(kv_heads=2), out=tmp_path / "alone", text_only=True, **HALF)
    with pytest.raises(InvalidInput, match="name the quantised checkpoint that the tower was taken from"):
        kvfold.assemble(tmp_path / "alone", source.parent / "llava", out=tmp_path / "whole")
