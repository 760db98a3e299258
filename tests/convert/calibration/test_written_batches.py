"""Batches of a text on disk: read as they were saved, or not at all."""

import shutil
from pathlib import Path

import torch

from kvfold.convert.calibration.written_batches import WrittenBatches

CHANCE = torch.arange(6, dtype=torch.float64).view(2, 3) / 8
TOKENS, ENTROPY = torch.tensor([[1, 70000, 3], [4, 5, 6]]), torch.rand(2, 3)


def test_a_batch_is_found_again(tmp_path: Path) -> None:
    WrittenBatches(tmp_path / "written", "model").save(CHANCE, 1, TOKENS, ENTROPY)
    found = WrittenBatches(tmp_path / "written", "model").find(CHANCE, 1)
    assert found
    assert torch.equal(found[0], TOKENS)
    assert found[0].dtype == torch.int64
    assert torch.equal(found[1], ENTROPY)


def test_another_text_is_not_found(tmp_path: Path) -> None:
    kept = WrittenBatches(tmp_path, "model")
    kept.save(CHANCE, 1, TOKENS, ENTROPY)
    assert kept.find(CHANCE, 2) is None
    assert kept.find(CHANCE, None) is None
    assert kept.find(CHANCE.view(3, 2), 1) is None
    assert kept.find(CHANCE + 0.1, 1) is None
    assert WrittenBatches(tmp_path, "other").find(CHANCE, 1) is None


def test_what_is_damaged_or_foreign_is_not_believed(tmp_path: Path) -> None:
    kept = WrittenBatches(tmp_path / "written", "model")
    kept.save(CHANCE, 1, TOKENS, ENTROPY)
    (file,) = kept.directory.iterdir()
    whole = file.read_bytes()
    damaged = [whole[:end] for end in range(0, len(whole), 7)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole) - 48, len(whole))
    ]
    damaged.append(bytes(len(whole)))
    for content in damaged:
        file.write_bytes(content)
        assert kept.find(CHANCE, 1) is None
    other = WrittenBatches(tmp_path / "other", "model")
    other.save(CHANCE / 2, 1, TOKENS, ENTROPY)  # a whole file under another's name
    shutil.copyfile(next(other.directory.iterdir()), file)
    assert kept.find(CHANCE, 1) is None
    file.rename(file.with_suffix(".safetensors.partial"))
    assert kept.find(CHANCE, 1) is None
    (tmp_path / "whole").write_bytes(whole)
    file.symlink_to(tmp_path / "whole")
    assert kept.find(CHANCE, 1) is None
    kept.save(CHANCE, 1, TOKENS, ENTROPY)
    assert (tmp_path / "whole").read_bytes() == whole
    assert kept.find(CHANCE, 1) is not None
