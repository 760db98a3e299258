"""Working directories with files that kvfold did not write: they are refused, and nothing of them is lost."""

import os
from pathlib import Path

import pytest

from kvfold import recipes
from kvfold.checkpoints.own_files import remove_own_tree, strange_files

from .conftest import GQA, Scene

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links")


def test_strangers_stay_where_they_are(tmp_path: Path) -> None:
    work, precious = tmp_path / "state", tmp_path / "precious"
    (work / "step-00000001").mkdir(parents=True)
    (work / "trackers" / "run").mkdir(parents=True)
    precious.mkdir()
    for file in ("step-00000001/weights.safetensors", "step-00000001/thesis.tex", "trackers/run/any.name"):
        (work / file).touch()
    (precious / "config.json").touch()
    (work / "elsewhere").symlink_to(precious)
    strange = {work / "elsewhere", work / "step-00000001" / "thesis.tex"}
    assert set(strange_files(work)) == strange
    remove_own_tree(work)
    assert {path for path in work.rglob("*") if path.is_symlink() or not path.is_dir()} == strange
    assert (precious / "config.json").exists()


@pytest.mark.parametrize(
    "name", ["state/step-00000001/thesis.tex", "stages/kl/thesis.tex", "best/thesis.tex"]
)
def test_a_strangers_file_deep_in_a_run(scene: Scene, name: str) -> None:
    recipe, partial = scene.root / "recipe.yaml", scene.root / "trained.partial"
    _write_recipe(recipe)
    (partial / name).parent.mkdir(parents=True)
    (partial / name).write_text("mine")
    (partial / "lock").touch()
    scene.refused("distill", recipe, says=f"it holds {name}")


@pytest.mark.parametrize("name", ["state", "stages", "best", "final", "tokens.bin"])
def test_a_link_in_a_run(scene: Scene, name: str) -> None:
    recipe, partial = scene.root / "recipe.yaml", scene.root / "trained.partial"
    _write_recipe(recipe)
    partial.mkdir()
    (partial / "lock").touch()
    precious = scene.root / "precious"
    (precious / "step-00000001").mkdir(parents=True)
    (precious / "mine").write_text("mine")
    (partial / name).symlink_to(precious / "mine" if "." in name else precious)
    scene.refused("distill", recipe, says=name)


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


def _write_recipe(file: Path) -> None:
    demo = Path(recipes.__file__).parent / "demo"
    stage = "{name: kl, tokens: 64, batch_tokens: 32, lr: 1e-3}"
    file.write_text(
        f"schema: 1\nstudent: {demo}\nteacher: {demo}\noutput: {file.with_name('trained')}\n"
        f"data: {{source: stdlib, seq_len: 16}}\nstages: [{stage}]\ndevice: cpu\n"
    )
