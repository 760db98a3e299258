"""A source with room for a choice of rotary widths, and its statistics."""

from pathlib import Path

import pytest

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source

from ...support.tiny import make


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("choice") / "source", num_key_value_heads=4, head_dim=16)


@pytest.fixture(scope="module")
def statistics(source: Path) -> Statistics:
    taken = study(open_source(source), "self", sequences=4, length=32, seed=0)
    assert taken is not None
    return taken
