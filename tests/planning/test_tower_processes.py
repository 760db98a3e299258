"""Calibrated plans of multimodal checkpoints by several processes: none of them copies the tower."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.checkpoints.shards import ShardWriter
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.request import request_of
from kvfold.convert.settle import preparation
from kvfold.convert.towers.tower import find_tower, write_tower
from kvfold.convert.towers.view import tower_source
from kvfold.core.errors import InvalidInput
from kvfold.fold_run import dry_run

from ..support.pair import do_as_pair
from ..support.quantised import quantise, quantised_tower
from ..support.towers import TOWERS, make_multimodal

FEW: dict[str, Any] = {"sequences": 2, "length": 16}


def planned(source: Path, **options: Any) -> dict[str, Any] | None:
    """Return the plan of a calibrated fold; None in processes but the first."""
    request = request_of(source, kvfold.GQA(kv_heads=2), calibration="self", **{**FEW, **options})
    found = dry_run(request)
    return None if found is None else found[0]


def in_pair(rank: int, source: Path, place: Path, work: Callable[[Path, Path], None]) -> None:
    """Do work in one of two processes whose temporary directories are in `place`; no weight is written."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "TMPDIR": str(place)}
    ShardWriter.__init__ = refuse  # type: ignore[method-assign]
    work(source, place)


def refuse(*_: Any) -> None:
    raise AssertionError("a weight is written")


def plan_in_pair(source: Path, place: Path) -> None:
    found = planned(source)
    if found is None:
        return
    assert found["source"] == str(source)
    assert found["calibration"]["tokens"] == 32


def fail_in_pair(source: Path, place: Path) -> None:
    with pytest.raises(InvalidInput, match="are fewer than the 2 processes"):
        planned(source, sequences=1)


@pytest.mark.parametrize("work", [plan_in_pair, fail_in_pair])
def test_two_processes_write_and_leave_nothing(work: Callable[[Path, Path], None], tmp_path: Path) -> None:
    source, place = make_multimodal(tmp_path / "llava", "llava"), tmp_path / "temporary"
    place.mkdir()
    do_as_pair(in_pair, tmp_path, source, place, work)
    assert list(place.glob("kvfold*")) == []


@pytest.mark.parametrize(("kind", "form"), [*((kind, None) for kind in TOWERS), ("llava", "gptq")])
def test_statistics_in_place_are_the_towers_alone(kind: str, form: str | None, tmp_path: Path) -> None:
    """Also where experts are merged and weights are quantised."""
    source = make_multimodal(tmp_path / "source", kind)
    if form is not None:
        source = quantise(source, tmp_path / "quantised", quantised_tower(form))
    tower = find_tower(source)
    assert tower is not None
    write_tower(tower, tmp_path / "tower", 10**9)
    alone = study(open_source(tmp_path / "tower"), "self", seed=0, **FEW)
    with tower_source(tower) as view:
        assert not view.checkpoint.is_in_place
        in_place = study(view, "self", seed=0, **FEW)
    assert in_place.fingerprint() == alone.fingerprint()


def test_a_multimodal_source_that_changes_while_it_is_calibrated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_multimodal(tmp_path / "llava", "llava")
    config = json.loads((source / "config.json").read_text())

    def changing(*_: Any, **__: Any) -> None:
        (source / "config.json").write_text(json.dumps({**config, "image_token_index": 3}))

    monkeypatch.setattr(preparation, "study", changing)
    with pytest.raises(InvalidInput, match=f"{source / 'config.json'} changed while it was read"):
        planned(source)
