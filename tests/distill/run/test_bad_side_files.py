"""Files next to the weights of student and teacher that cannot be copied, refused before any training."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.distill.run.job import distill

from ..conftest import MakeRecipe

DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "link": ("LICENSE", lambda path: path.symlink_to("/etc/hostname"), "a link to a file outside"),
    "no JSON": ("generation_config.json", lambda path: path.write_text("{"), "generation_config.json"),
    "metadata": ("README.md", lambda path: path.write_text("---\ntags: 7\n---\n"), "README.md"),
}


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("case", DAMAGE)
def test_side_files_are_checked_first(
    make_recipe: MakeRecipe, student: Path, teacher: Path, tmp_path: Path, case: str, role: str
) -> None:
    name, damage, sentence = DAMAGE[case]
    places = {"student": student, "teacher": teacher}
    places[role] = Path(shutil.copytree(places[role], tmp_path / role))
    (places[role] / name).unlink(missing_ok=True)
    damage(places[role] / name)
    recipe = make_recipe(**{name: str(place) for name, place in places.items()})
    with pytest.raises(InvalidInput, match=sentence):
        distill(recipe)
    assert not (tmp_path / "out.partial").exists()
