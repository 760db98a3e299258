"""The length of calibration sequences where the user names none."""

import json
from math import exp
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold import MQA, fold
from kvfold.checkpoints.record import read_record
from kvfold.convert.calibration.capacity import Need
from kvfold.convert.calibration.reach import (
    READ,
    WRITTEN,
    breakdown,
    default_length,
    joined_lengths,
    jump,
    reach_of,
)
from kvfold.convert.calibration.study import study
from kvfold.convert.calibration.text_length import at_context
from kvfold.convert.families.source import open_source
from kvfold.models.layered_model import LayeredModel

from ...support.tiny import make

BROKEN = 64  # the position from which the source of `broken` predicts next to nothing


def entropies(mean_T: torch.Tensor) -> torch.Tensor:
    noise_BT = torch.randn(24, len(mean_T), generator=torch.Generator().manual_seed(0))
    return mean_T + noise_BT + 0.3 * noise_BT[:, :1]


@pytest.mark.parametrize("end", [64, 128, 256])
def test_a_jump_is_found(end: int) -> None:
    mean_T = torch.full((512,), 4.0)
    mean_T[end:] += 1.0
    assert jump(entropies(mean_T)) == end


@pytest.mark.parametrize("mean_T", [
    torch.full((512,), 4.0),
    torch.linspace(4, 3, 512),
    0.7 - 0.5 * torch.exp(-torch.arange(512) / 60.0),  # a text that begins with a phrase
    1 + 0.2 * torch.arange(1, 513).log2(),
    3.5 + 0.3 * (torch.arange(512) >= 128),  # SmolLM2-135M, whose own text drifts away
], ids=["flat", "falling", "rising to a level", "rising as a logarithm", "rising by a little"])  # fmt: skip
def test_text_that_changes_slowly_is_whole(mean_T: torch.Tensor) -> None:
    assert jump(entropies(mean_T)) is None


class Reader:
    """A model that predicts the next number of a count, less surely from a position on."""

    device = torch.device("cpu")

    def __init__(self, end: int, rise: float = 1.0) -> None:
        self.end, self.rise = end, rise

    def __call__(self, *, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        assert not use_cache
        next_BT = (input_ids + 1) % 50
        p_BT1 = torch.where(torch.arange(input_ids.shape[1]) < self.end, 0.5, 0.5 * exp(-self.rise))
        p_BT1 = p_BT1.expand_as(input_ids)[..., None]
        p_BTV = ((1 - p_BT1) / 49).expand(-1, -1, 50).scatter(2, next_BT[..., None], p_BT1)
        return SimpleNamespace(logits=p_BTV.log()[:, -logits_to_keep:])


COUNTS_BT = (torch.arange(512) + torch.arange(16)[:, None]) % 50


@pytest.mark.parametrize("end", [64, 128, 256])
def test_a_text_behind_another_shows_where_a_source_ends(end: int) -> None:
    assert breakdown(Reader(end), COUNTS_BT, 512) == end
    assert breakdown(Reader(end), COUNTS_BT[:, :256], 512) == end


@pytest.mark.parametrize(("reader", "tokens_BT"), [
    (Reader(512), COUNTS_BT),
    (Reader(128, rise=0.2), COUNTS_BT),  # sound sources lose as much behind another text
    (Reader(128), COUNTS_BT[:5]),
    (Reader(64), COUNTS_BT[:, :127]),
], ids=["sound", "a little worse", "too few pairs", "too short to see"])  # fmt: skip
def test_a_text_behind_another_shows_nothing(reader: Reader, tokens_BT: torch.Tensor) -> None:
    assert breakdown(reader, tokens_BT, 1024) is None


def test_pairs_are_joined_as_far_as_a_source_reads() -> None:
    assert breakdown(Reader(256), COUNTS_BT[:, :256], 511) is None
    assert joined_lengths(16, 512, 4096) == joined_lengths(16, 512, 512) == [64, 128, 256]
    assert joined_lengths(16, 1024, 4096) == [64, 128, 256, 512]
    assert joined_lengths(16, 256, 4096) == [64, 128, 256]
    assert joined_lengths(16, 256, 511) == joined_lengths(16, 255, 4096) == [64, 128]
    assert joined_lengths(16, 127, 4096) == joined_lengths(5, 512, 4096) == []


def test_pairs_of_texts_overrule_entropies() -> None:
    jump_BT = torch.zeros(16, 511)
    jump_BT[:, 128:] = 3.0
    assert reach_of(COUNTS_BT, jump_BT, Reader(512), 512) is None
    assert reach_of(COUNTS_BT, torch.zeros(16, 511), Reader(128), 512) == (128, "it predicts text much worse")
    by_entropy = (128, "its entropy jumps")
    assert reach_of(COUNTS_BT[:5], jump_BT[:5], Reader(512), 512) == by_entropy
    assert reach_of(COUNTS_BT[:, :127], jump_BT[:, 64:190], Reader(512), 512) == (64, "its entropy jumps")


def test_one_sequence_shows_nothing() -> None:
    assert jump(torch.cat([torch.ones(1, 256), torch.full((1, 256), 9.0)], 1)) is None


@pytest.mark.parametrize(("rope", "stated", "length"), [
    ("default", None, READ),
    ("default", 200, 200),
    ("default", 10**30, READ),
    ("default", "unknown", READ),
    ("llama3", None, 64),
    ("yarn", None, 32),
])  # fmt: skip
def test_files_say_what_a_source_learned_from(tmp_path: Path, rope: str, stated: object, length: int) -> None:
    source = make(tmp_path / "source", rope=rope, max_position_embeddings=1024)
    if stated is not None:
        (source / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    assert default_length(open_source(source), "stdlib") == length
    for own in ("self", "self+stdlib", None):
        assert default_length(open_source(source), own) == min(length, WRITTEN)


def make_broken(directory: Path, end: int) -> Path:
    """Make a source whose positions from `end` on drown what it knows."""
    source = make(directory, "gpt2", max_position_embeddings=256)
    file = source / "model.safetensors"
    tensors = load_file(file)
    words_VD = tensors["transformer.wte.weight"] * 30
    loud_D, still_D = torch.linalg.svd(words_VD)[2][[0, -1]]
    tensors["transformer.wte.weight"] = words_VD
    tensors["transformer.wpe.weight"][:end] = 1e3 * loud_D
    tensors["transformer.wpe.weight"][end:] = 1e3 * still_D
    tensors["transformer.ln_f.weight"].fill_(1.0)
    tensors["transformer.ln_f.bias"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    return source


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_broken(tmp_path_factory.mktemp("broken") / "source", BROKEN)


def test_calibration_stops_where_the_sources_own_text_breaks_down(tmp_path: Path, broken: Path) -> None:
    folded = fold(broken, MQA(), out=tmp_path / "out", sequences=4, refine=0)
    record = read_record(folded.directory)
    assert record["calibration"]["length"] == BROKEN
    assert record["calibration"]["tokens"] == 4 * BROKEN
    assert any(f"from position {BROKEN} on" in notice for notice in folded.notices)
    assert "--length" not in record["command"]
    again = fold(broken, MQA(), out=tmp_path / "again", sequences=4, refine=0)
    files = [(made.directory / "model.safetensors").read_bytes() for made in (folded, again)]
    assert files[0] == files[1]


def test_large_sources_read_pairs(broken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Six sequences make pairs; the notice counts how often layers are read for them."""
    reads, load = list[int](), LayeredModel.load
    source, how = open_source(broken), {"sequences": 6, "seed": 0}
    whole = study(source, "self", **how, layerwise=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Need, "fitting_layers", lambda *_: 0)
        patch.setattr(LayeredModel, "load", lambda self, number: reads.append(number) or load(self, number))
        layered = study(source, "self", **how, layerwise=True, work=tmp_path)
    assert layered.reach == whole.reach == BROKEN
    assert caplog.text.count("it predicts text much worse") == 2
    passes = int(caplog.text.partition("layers are read ")[2].split()[0])
    for_statistics, written = 2, 255
    assert written < max(map(reads.count, reads)) - for_statistics <= passes


@pytest.mark.parametrize(
    ("sound", "named", "length", "told"), [(False, 200, 200, "leave out length 200"), (True, None, 128, None)]
)
def test_a_length_that_is_named_or_sound_stays(
    tmp_path: Path, broken: Path, sound: bool, named: int | None, length: int, told: str | None
) -> None:
    source = make(tmp_path / "source", "gpt2", max_position_embeddings=128) if sound else broken
    folded = fold(source, MQA(), out=tmp_path / "out", sequences=4, refine=0, length=named)
    record = read_record(folded.directory)
    assert record["calibration"]["length"] == length
    assert any((told or "breaks down") in notice for notice in folded.notices) == (told is not None)


def test_a_source_that_breaks_down_behind_its_text_is_folded_for_that_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts of 128 tokens are sound, and two of them in a row are not."""
    source = open_source(make_broken(tmp_path / "source", 128))
    found = study(source, "self", sequences=6, seed=0, length=128)
    assert found.reach == found.layers[0].input_BTD.shape[1] == 128
    assert "much worse after 128 tokens; greater distances are left out, unless --context" in caplog.text
    at_all = at_context(source, found, None)
    assert at_all.layers[0].distance_NT.shape[1] == 128
    asked = at_context(source, found, 256)
    assert asked.layers[0].distance_NT.shape[1] == 256
