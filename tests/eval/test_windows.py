"""Windows hold the text's tokens once and in order; what cannot be cut says why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from kvfold.core.errors import InvalidInput
from kvfold.eval import windows as protocols
from kvfold.eval.options import Options
from kvfold.eval.windows import cut, window_length
from kvfold.models.causal_lm import load
from kvfold.texts import token_parts
from kvfold.texts.corpus import Text, read_text

from .conftest import Make

CPU = Options(device="cpu")
DEMO = Path(__file__).parents[2] / "recipes" / "demo"


def test_windows_are_the_text_in_order_with_bos_before_each(mha: Path, text: Text) -> None:
    loaded = load(mha, CPU)
    windows = cut(text, loaded, 32, CPU)
    ids = loaded.tokenizer(text.joined, add_special_tokens=False).input_ids
    assert windows.name == "text:letters.txt window=32 bos=each"
    assert windows.ids_NW.shape == (600 // 31, 32)
    assert windows.ids_NW[:, 0].unique().tolist() == [loaded.tokenizer.bos_token_id]
    assert windows.ids_NW[:, 1:].flatten().tolist() == ids[: 600 // 31 * 31]


def test_without_bos_a_window_is_all_text(mha: Path, text: Text) -> None:
    loaded = load(mha, CPU)
    windows = cut(text, loaded, 32, Options(bos=False))
    assert windows.name == "text:letters.txt window=32 bos=none"
    assert (
        windows.ids_NW.flatten().tolist()
        == loaded.tokenizer(text.joined, add_special_tokens=False).input_ids[: 18 * 32]
    )


def test_a_tokenizer_without_bos_gets_none(make: Make, text: Text) -> None:
    loaded = load(make(bos=None), CPU)
    assert cut(text, loaded, 32, CPU).name.endswith("bos=none")
    with pytest.raises(InvalidInput, match="has no BOS token; use --no-bos"):
        cut(text, loaded, 32, Options(bos=True))


def test_fewer_windows_are_another_protocol_only_if_they_drop_text(mha: Path, text: Text) -> None:
    loaded = load(mha, CPU)
    few, all_of_them = (cut(text, loaded, 32, Options(max_windows=count)) for count in (3, 1000))
    assert (few.name, len(few.ids_NW)) == ("text:letters.txt window=32 bos=each max-windows=3", 3)
    assert all_of_them.name == "text:letters.txt window=32 bos=each"


def test_the_default_window_is_the_shortest_of_the_models(make: Make, mha: Path) -> None:
    models = [
        load(mha, CPU),
        load(make(max_position_embeddings=48), CPU),
        load(make(max_position_embeddings=9999), CPU),
    ]
    assert window_length(None, models) == 48
    assert window_length(None, models[2:]) == 2048
    assert window_length(40, models) == 40
    with pytest.raises(InvalidInput, match="--window 64 exceeds the 48 positions"):
        window_length(64, models)


@pytest.mark.parametrize("documents", [("",), ("a",), ("ab" * 15,)])
def test_a_text_shorter_than_a_window_says_what_would_fit(mha: Path, documents: tuple[str]) -> None:
    loaded = load(mha, CPU)
    tokens = len(documents[0])
    advice = f"--window {tokens + 1} would fit" if tokens else "give a longer text"
    with pytest.raises(InvalidInput, match=rf"x has {tokens} tokens, but .* 32 takes 31 of them; {advice}"):
        cut(Text("x", documents), loaded, 32, CPU)
    if tokens:
        assert len(cut(Text("x", documents), loaded, tokens + 1, CPU).ids_NW) == 1


def test_ids_beyond_the_models_vocabulary_are_refused(make: Make, text: Text) -> None:
    with pytest.raises(InvalidInput, match=r"gives id \d+, but its model has 50 ids"):
        cut(text, load(make(vocab_size=50), CPU), 32, CPU)


def test_the_standard_library_is_a_text_that_needs_no_file(mha: Path) -> None:
    windows = cut(read_text("stdlib"), load(mha, CPU), 64, Options(max_windows=2))
    assert windows.name == "stdlib window=64 bos=each max-windows=2"
    assert windows.ids_NW.shape == (2, 64)


def test_a_few_windows_of_a_long_text_do_not_tokenise_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text, loaded = read_text("stdlib"), load(DEMO, CPU)
    whole = cut(text, loaded, 256, CPU)
    part = 2**16
    monkeypatch.setattr(token_parts, "PART", part)
    read: list[int] = []

    class Counted:
        is_fast = True
        bos_token_id = loaded.tokenizer.bos_token_id

        def __call__(self, part: str, **how: Any) -> Any:
            read.append(len(part))
            return loaded.tokenizer(part, **how)

    few = cut(text, replace(loaded, tokenizer=Counted()), 256, Options(max_windows=12))
    assert read == [part, part]
    assert len(text.joined) > 3 * sum(read)
    for name in ("ids_NW", "scored_NT", "bytes_N"):
        assert torch.equal(getattr(few, name), getattr(whole, name)[:12]), name


def test_a_tokenizer_without_offsets_gives_all_tokens_the_average_size() -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, **how: Any) -> Any:
            return BatchEncoding({"input_ids": [1, 2, 3, 4]})

    assert protocols._first_tokens(Slow(), "\u00e4" * 6, 2) == ([1, 2, 3, 4], [3, 3, 3, 3])
