"""Texts that a migration trains on and is judged by."""

from pathlib import Path

import pytest

from kvfold.texts.standard_library import stdlib_documents


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    (place / "train.txt").write_text("\n".join(stdlib_documents(held_out=False)[:3])[:20000])
    (place / "held.txt").write_text(stdlib_documents(held_out=True)[0][:4000])
    return place
