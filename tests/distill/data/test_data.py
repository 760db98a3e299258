"""The order of data is a pure function of (seed, index); what is learnt is what the packing says."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvfold.core.console import listening
from kvfold.core.errors import InvalidInput
from kvfold.distill.data import token_documents
from kvfold.distill.data.batch import IGNORED
from kvfold.distill.data.order import Stream, TrainingWindows, schedule, windows_per_source
from kvfold.distill.data.token_documents import SCORED, START
from kvfold.distill.data.token_store import open_windows, write_tokens
from kvfold.distill.recipe.data_section import Data
from kvfold.texts import token_parts

from ...support.tokenizers import save_tokenizer


def stream(length: int, first: int = 0) -> Stream:
    return Stream(np.arange(first, first + length, dtype=np.int32), np.full(length, SCORED, dtype=np.uint8))


def plain(seed: int) -> TrainingWindows:
    return TrainingWindows([stream(101)], Data(source="stdlib", seq_len=10, seed=seed))


def test_an_epoch_has_every_window_once_and_each_its_own_order() -> None:
    windows = plain(seed=3)
    assert len(windows) == 10
    epochs = [windows.batch(range(first, first + 10)) for first in (0, 10)]
    for epoch in epochs:
        assert sorted(epoch.input_ids_BS[:, 0].tolist()) == list(range(0, 100, 10))
        assert torch.equal(epoch.input_ids_BS, epoch.input_ids_BS[:, :1] + torch.arange(10))
        assert torch.equal(epoch.labels_BS, epoch.input_ids_BS + 1)
        assert torch.equal(epoch.position_ids_BS, torch.arange(10).expand(10, -1))
    assert not torch.equal(epochs[0].input_ids_BS, epochs[1].input_ids_BS)


def test_a_cursor_gives_the_same_windows_wherever_reading_starts() -> None:
    whole = plain(seed=3).batch(range(25)).input_ids_BS
    assert torch.equal(plain(seed=3).batch(range(17, 25)).input_ids_BS, whole[17:])
    for rank in range(2):
        assert torch.equal(plain(seed=3).batch(range(rank, 25, 2)).input_ids_BS, whole[rank::2])
    assert not torch.equal(plain(seed=4).batch(range(25)).input_ids_BS, whole)


def test_sources_share_the_windows_by_weight_from_the_first_on() -> None:
    weights = [5.0, 3.0, 1.5, 0.5]
    source_W, index_W = schedule(weights, 4096)
    for source, weight in enumerate(weights):
        counts = np.cumsum(source_W == source)
        due = np.arange(1, 4097) * weight / 10
        assert np.abs(counts - due).max() < 2
        assert index_W[source_W == source].tolist() == list(range(counts[-1]))
    for count in (1, 7, 1000):
        short_source_W, short_index_W = schedule(weights, count)
        assert (short_source_W == source_W[:count]).all()
        assert (short_index_W == index_W[:count]).all()
    assert sum(windows_per_source(weights, 777)) == 777
    assert windows_per_source([2.0], 10**15) == [10**15]  # without an array of them


def test_a_mixture_is_a_pure_function_of_the_cursor() -> None:
    sources = [{"source": "a/b", "weight": 3}, {"source": "c/d", "weight": 1}]
    data = Data.model_validate({"source": sources, "seq_len": 10, "seed": 3})
    streams = [stream(101), stream(51, first=1000)]
    whole = TrainingWindows(streams, data).batch(range(4000)).input_ids_BS
    is_second = whole[:, 0] >= 1000
    assert abs(int(is_second.sum()) / 4000 - 0.25) < 0.02 * 0.25
    late = TrainingWindows(streams, data)
    assert torch.equal(late.batch(range(3000, 4000, 7)).input_ids_BS, whole[3000::7])
    assert torch.equal(late.batch(range(3)).input_ids_BS, whole[:3])
    for own, held in ((whole[~is_second], 10), (whole[is_second], 5)):  # each source has epochs of its own
        assert all(
            len(set(epoch[:, 0].tolist())) == held for epoch in own[: len(own) // held * held].split(held)
        )
    assert late.repeated(13) == []
    assert late.repeated(14) == ["a/b holds 10 windows and the run reads 11, so some are read again"]


def test_positions_start_again_and_nothing_is_predicted_across_a_boundary() -> None:
    marks = np.full(21, SCORED, dtype=np.uint8)
    marks[[0, 4, 5, 13]] = START
    (tokens, _), data = stream(21), Data(source="stdlib", seq_len=10)
    windows = TrainingWindows([Stream(tokens, marks)], data)
    batch = windows.batch(range(2))
    first, second = np.argsort(batch.input_ids_BS[:, 0].numpy())
    assert batch.position_ids_BS[first].tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4]
    assert batch.position_ids_BS[second].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    assert batch.labels_BS[first].tolist() == [1, 2, 3, IGNORED, IGNORED, 6, 7, 8, 9, 10]
    assert batch.labels_BS[second].tolist() == [11, 12, IGNORED, *range(14, 21)]
    assert windows.scored([0]) + windows.scored([1]) == windows.scored(range(2)) == batch.count == 17


def write(tmp_path: Path, data: Data, tokenizer: Any, windows: int = 10**4, teacher: Any = None) -> Stream:
    """Write the tokens of a source."""
    for name in ("tokens.bin", "marks.bin", "tokens.json"):
        (tmp_path / name).unlink(missing_ok=True)
    write_tokens(tmp_path / "tokens.bin", data, tokenizer, windows, teacher, vocabulary=len(tokenizer))
    tokens = np.fromfile(tmp_path / "tokens.bin", dtype=np.int32)
    assert sum(json.loads((tmp_path / "tokens.json").read_text())["tokens"]) == len(tokens)
    return Stream(tokens, np.fromfile(tmp_path / "marks.bin", dtype=np.uint8))


def documents(tmp_path: Path, data: Data, student: Path, windows: int = 10**4) -> list[str]:
    """The documents in the token stream of a source."""
    tokenizer = AutoTokenizer.from_pretrained(student)
    decoded: str = tokenizer.decode(write(tmp_path, data, tokenizer, windows).tokens)
    assert decoded.startswith("<s>")
    return decoded.removeprefix("<s>").split("<s>")


@pytest.fixture(scope="module")
def with_eos(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """The tests' tokenizer with `end` (257) as EOS."""
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.eos_token = "end"
    return tokenizer


def test_a_document_is_bos_its_text_and_eos(tmp_path: Path, with_eos: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    a, b, c = with_eos("abc").input_ids
    data = Data(source=str(tmp_path / "a.jsonl"), seq_len=3, seed=1)
    tokens, marks = write(tmp_path, data, with_eos)
    assert sorted([tokens[:4].tolist(), tokens[4:].tolist()]) in (
        [[0, a, b, 257], [0, c, 257]],
        [[0, a, b], [0, c, 257, 257]],
    )
    assert (marks == np.where(tokens == 0, START, SCORED)).all()
    stream_tokens, stream_marks = write(tmp_path, data.model_copy(update={"packing": "stream"}), with_eos)
    assert stream_tokens.tolist() == [token for token in tokens if token != 257]
    assert (stream_marks == SCORED).all()
    with_eos.bos_token = None  # then a document begins with EOS, as in the training text of GPT-2
    try:
        assert (write(tmp_path, data, with_eos).tokens == np.where(tokens == 0, 257, tokens)).all()
    finally:
        with_eos.bos_token = "<s>"


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_a_long_document_is_written_in_parts(
    tmp_path: Path, with_eos: PreTrainedTokenizerFast, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts.jsonl").write_text(
        "".join(
            json.dumps({"text": "".join(random.Random(n).choices("abcdefgh ", k=n))}) + "\n"
            for n in (900, 7, 700)
        )
    )
    data = Data(source=str(tmp_path / "texts.jsonl"), seq_len=8, packing=packing)
    found = []
    for part in (token_parts.PART, 200):
        monkeypatch.setattr(token_parts, "PART", part)
        monkeypatch.setattr(token_parts, "_OVERLAP", 60)
        place = tmp_path / str(part)
        place.mkdir()
        write_tokens(place / "tokens.bin", data, with_eos, 150, vocabulary=len(with_eos))
        found.append([(place / name).read_bytes() for name in ("tokens.bin", "marks.bin", "tokens.json")])
    assert found[0] == found[1]
    assert len(found[0][1]) == 150 * 8 + 1


def test_every_kind_of_file(tmp_path: Path, student: Path) -> None:
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("first", "second", ""))
    (tmp_path / "many").mkdir()
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "many" / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.txt").write_text("first\n\nline\n")
    for source, expected in (
        ("a.jsonl", ["first", "second"]),
        ("many", ["first", "second"]),
        ("*/*.xz", ["first", "second"]),
        ("a.json.gz", ["first", "second"]),
        ("a.txt", ["first\n\nline\n"]),
    ):
        data = Data(source=str(tmp_path / source), seq_len=4)
        assert sorted(documents(tmp_path, data, student)) == expected


def test_the_standard_library_and_an_early_stop(tmp_path: Path, student: Path) -> None:
    data = Data(source="stdlib", seq_len=16, seed=5)
    some = documents(tmp_path, data, student, windows=300)
    assert len(open_windows(tmp_path / "tokens.bin", data)) == 300
    more = documents(tmp_path, data, student, windows=600)
    assert "".join(more).startswith("".join(some)[:4000])
    assert documents(tmp_path, data.model_copy(update={"seed": 6}), student, windows=300) != some


def test_a_mixture_of_texts_is_written_by_weight(tmp_path: Path, student: Path) -> None:
    for letter in "xy":
        (tmp_path / f"{letter}.txt").write_text(letter * 5000)
    sources = [
        {"source": str(tmp_path / "x.txt"), "weight": 1},
        {"source": str(tmp_path / "y.txt"), "weight": 2},
    ]
    data = Data.model_validate({"source": sources, "seq_len": 16})
    tokenizer = AutoTokenizer.from_pretrained(student)
    write(tmp_path, data, tokenizer, 300)
    assert json.loads((tmp_path / "tokens.json").read_text())["tokens"] == [100 * 16 + 1, 200 * 16 + 1]
    ids = open_windows(tmp_path / "tokens.bin", data).batch(range(300)).input_ids_BS
    assert [int((ids[:, -1] == tokenizer.convert_tokens_to_ids(letter)).sum()) for letter in "xy"] == [
        100,
        200,
    ]


@pytest.mark.parametrize("name", ["tokens.bin", "marks.bin"])
def test_changed_tokens_are_not_resumed(tmp_path: Path, with_eos: PreTrainedTokenizerFast, name: str) -> None:
    data = Data(source="stdlib", seq_len=16)
    write(tmp_path, data, with_eos, 10)
    open_windows(tmp_path / "tokens.bin", data, len(with_eos))
    with (tmp_path / name).open("r+b") as stream:
        stream.write(b"\7")
    with pytest.raises(InvalidInput, match=f"has changed since it was written; remove {tmp_path} to start"):
        open_windows(tmp_path / "tokens.bin", data, len(with_eos))


def test_text_the_teacher_writes(tmp_path: Path, teacher: Path, with_eos: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    data = Data(source="self", seq_len=32, seed=3)
    tokens, marks = write(tmp_path, data, with_eos, 40, model)
    assert len(tokens) == 40 * 32 + 1
    starts = np.flatnonzero(marks & START)
    assert (tokens[starts] == 0).all()
    assert ((marks == SCORED) == ~(marks & START).astype(bool)).all()
    inside = np.ones(len(tokens), dtype=bool)
    inside[starts[1:] - 1] = False
    assert not (tokens[:-1] == 257)[inside[:-1]].any()  # whatever follows EOS is another document
    again, _ = write(tmp_path, data, with_eos, 40, model)
    assert (tokens == again).all()
    other, _ = write(tmp_path, data.model_copy(update={"seed": 4}), with_eos, 40, model)
    assert (tokens != other).any()
    # The teacher is far surer of what it wrote than of noise.
    ids = open_windows(tmp_path / "tokens.bin", data).batch(range(40)).input_ids_BS
    noise = torch.randint(1, 257, ids.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, random_ids = (float(model(input_ids=x, labels=x).loss) for x in (ids, noise))
    assert own < random_ids - 1


def test_progress_names_the_part_of_a_long_text(
    tmp_path: Path, teacher: Path, student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_documents, "_AT_ONCE", 64)
    heard = {}
    with listening(lambda description, done, total: heard.update({description: (done, total)})):
        model = AutoModelForCausalLM.from_pretrained(teacher).eval()
        write(tmp_path, Data(source="self", seq_len=32), AutoTokenizer.from_pretrained(student), 4, model)
    assert heard == {
        "text by the teacher, part 1 of 2": (32, 32),
        "text by the teacher, part 2 of 2": (32, 32),
    }


@pytest.mark.parametrize(
    ("device", "room", "count"),
    [("cpu", 0, 32), ("cpu", 99, 99), ("cpu", 999, 128), ("cuda", 0, 1), ("cuda", 3, 3), ("cuda", 999, 32)],
)
def test_a_teacher_writes_as_much_at_once_as_memory_holds(
    teacher: Path, monkeypatch: pytest.MonkeyPatch, device: str, room: int, count: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher)
    weights = sum(weight.nbytes for weight in model.parameters())
    one = 2 * 2 * 32 * 16 * 4  # keys and values of both layers, of a sequence of 16 tokens
    monkeypatch.setattr(token_documents, "gpu_bytes", lambda: weights + room * one)
    monkeypatch.setattr(token_documents, "_CACHE_ON_CPU", room * one)
    monkeypatch.setattr(type(model), "device", torch.device(device))
    assert token_documents._written_together(model, 16) == count


def test_mistakes_about_data_are_named(tmp_path: Path, student: Path, text: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(student)
    (tmp_path / "a.jsonl").write_text('{"body": "text", "n": 3}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"\n{"text')
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n\0\xff")
    noise = "".join(random.Random(0).choices("abcdefgh", k=4000))
    for name, compress in (("xz", lzma.compress), ("gz", gzip.compress), ("bz2", bz2.compress)):
        whole = compress(json.dumps({"text": noise}).encode())
        middle = len(whole) // 2
        (tmp_path / f"cut.jsonl.{name}").write_bytes(whole[:middle])
        (tmp_path / f"damaged.jsonl.{name}").write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    (tmp_path / "empty.jsonl").touch()
    rows: list[tuple[str, dict[str, str], str]] = [
        ("a.jsonl", {}, "has no field 'text'; data.text_field can be body, n"),
        ("a.jsonl", {"text_field": "n"}, "holds no text"),
        ("a.jsonl", {"text_field": "body"},
         "holds 5 tokens in 1 document, but one window of data.seq_len 16 takes 17"),
        ("bad.jsonl", {}, "cannot be read: line 1 is not JSON"),
        ("none.jsonl", {}, "is neither a file of .*.jsonl.* here nor an org/name on the Hub"),
        ("a.pdf", {}, "is of no known kind"),
        ("empty.jsonl", {}, "holds (no documents|0 tokens)"),
        ("self", {}, "data.source self is text that the teacher writes, but this run has no teacher"),
    ]  # fmt: skip
    compressed = [f"{kind}.jsonl.{name}" for kind in ("cut", "damaged") for name in ("xz", "gz", "bz2")]
    for name, keys, message in [*rows, *((file, {}, "cannot be read: ") for file in compressed)]:
        here = {"source": name if name == "self" else str(tmp_path / name), **keys}
        alone, mixed = {**here, "seq_len": 16}, {"source": [{"source": str(text)}, here], "seq_len": 16}
        # Each reader of a compressed file is a process of its own, which takes seconds to start.
        for content in (alone,) if name in compressed else (alone, mixed):
            data = Data.model_validate(content)
            with pytest.raises(InvalidInput, match=message):
                write_tokens(tmp_path / "tokens.bin", data, tokenizer, 10, vocabulary=len(tokenizer))
            assert not {"tokens.bin", "marks.bin", "tokens.json"} & {path.name for path in tmp_path.iterdir()}
