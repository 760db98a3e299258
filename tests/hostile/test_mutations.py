"""Random changes of the bytes of files: a command accepts the result, or refuses it in one sentence."""

import shutil
from pathlib import Path

import pytest

from .conftest import GQA, IS_THOROUGH, WEIGHTS, Scene

EXAMPLES = 1000 if IS_THOROUGH else 8


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "kvfold.json", "taken.safetensors"])
def test_bytes(originals: Path, scene: Scene, fold: Path, source: Path, file: str) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    place = {"kvfold.json": fold, "taken.safetensors": scene.root}.get(file, source) / file
    if file == "taken.safetensors":
        shutil.copyfile(originals / file, place)
    whole = place.read_bytes()
    is_tensors = place.suffix == ".safetensors"
    end = 8 + int.from_bytes(whole[:8], "little") if is_tensors else len(whole)
    words: dict[str, tuple[str | Path, ...]] = {
        "kvfold.json": ("verify", fold, "--lint"),
        "taken.safetensors": ("convert", source, *GQA, "--calibration", place, "--dry-run"),
    }
    change = st.tuples(
        st.integers(0, end - 1),
        st.integers(0, 3),
        st.one_of(
            st.binary(max_size=4),
            st.sampled_from([b"[", b"{", b'"', b"null", b"-1", b"1e999", b"NaN", b"\xff", b"[" * 5000]),
        ),
    )

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not IS_THOROUGH,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(change, min_size=1, max_size=3))
    def mutate(changes: list[tuple[int, int, bytes]]) -> None:
        content = whole
        for start, length, new in changes:
            content = content[:start] + new + content[start + length :]
        place.write_bytes(content)
        scene.survived(*words.get(file, ("convert", source, *WEIGHTS, "--dry-run")))

    mutate()
