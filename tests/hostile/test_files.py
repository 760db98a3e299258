"""Files next to the weights, statistics, records and names that are damaged or hostile."""

from pathlib import Path

from ..support.tiny import make
from .conftest import Scene


def test_a_deep_config_is_one_sentence(scene: Scene) -> None:
    source = make(scene.root / "source")
    (source / "config.json").write_text("[]")
    assert isinstance(source, Path)
    scene.refused("plan", source, says="config.json")
