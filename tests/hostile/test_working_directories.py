"""Working directories with files that kvfold did not write: they are refused, and nothing of them is lost."""

import os
from pathlib import Path

import pytest

from .conftest import GQA, Scene

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links")


def test_blobs_that_are_a_link_are_not_the_hubs_cache(scene: Scene, source: Path) -> None:
    place = scene.root / "models--org--tiny"
    (place / "snapshots").mkdir(parents=True)
    snapshot = source.rename(place / "snapshots" / ("0" * 40))
    (scene.root / "private").mkdir()
    (scene.root / "private" / "key").write_text("the secret key")
    (place / "blobs").symlink_to(scene.root / "private")
    (snapshot / "LICENSE").symlink_to("../../blobs/key")
    words = ("convert", snapshot, *GQA, "--calibration", "none", "--out", scene.root / "out")
    scene.refused(*words, says="LICENSE is a link to a file outside of the checkpoint")


@pytest.mark.parametrize("place", ["source/s.safetensors", "out/s.safetensors", "out.safetensors"])
def test_statistics_are_kept_elsewhere(scene: Scene, source: Path, place: str) -> None:
    out = scene.root / ("out.safetensors" if place == "out.safetensors" else "out")
    words = ("convert", source, *GQA, "--save-statistics", scene.root / place, "--out", out)
    scene.refused(*words, says="name a place elsewhere")
