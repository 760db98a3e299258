"""Messages of transformers while it reads files of others."""

import io
import logging
from pathlib import Path

from safetensors.torch import load_file, save_file

from kvfold.models.causal_lm import load_model

from ..support.tiny import make


def test_they_hold_no_control_characters(tmp_path: Path) -> None:
    """transformers logs names of weights that its class ignores, below words that it makes bold."""
    make(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    name = "a\x1b[31m\u202eb"
    save_file({**tensors, name: next(iter(tensors.values())).clone()}, file, {"format": "pt"})
    said = io.StringIO()
    handler, logger = logging.StreamHandler(said), logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        load_model(tmp_path / "source")
        logger.warning("its own \x1b[1mletters\x1b[0m")
    finally:
        logger.removeHandler(handler)
    report, _, after = said.getvalue().partition("its own")
    assert "LOAD REPORT" in report
    assert r"a\u202eb" in report
    assert all(letter.isprintable() or letter == "\n" for letter in report)
    assert "\x1b" in after  # elsewhere it logs as ever
