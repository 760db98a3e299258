"""Every layout gives the numbers that its integers and scales stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvfold.checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, open_checkpoint
from kvfold.checkpoints.quantised.schemes import SCHEMES

from ...support.quantised import FORMATS, quantise
from ...support.tiny import make

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("sources")
    return {family: make(place / family, family, **SIZES) for family in ("llama", "gpt_oss")}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_are_those_of_the_twin(
    name: str, shards: int, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.checkpoints.quantised.packed_checkpoint.PIECE", 1000)  # several pieces
    form = FORMATS[name]
    out = quantise(sources[form.family], tmp_path / "q", form, shards=shards)
    checkpoint = open_checkpoint(out)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    twin = load_file(tmp_path / "q-twin" / "model.safetensors")
    assert set(checkpoint) == set(twin)
    assert checkpoint.packed, "something is quantised"
    for tensor, expected in twin.items():
        assert checkpoint.spec(tensor).shape == tuple(expected.shape)
        assert torch.equal(checkpoint[tensor], expected), tensor
        half = checkpoint.read(tensor, torch.bfloat16)
        assert torch.equal(half, expected.to(torch.bfloat16)), tensor


def test_every_method_has_a_format_in_the_tests() -> None:
    assert {form.config["quant_method"] for form in FORMATS.values()} == set(SCHEMES)
