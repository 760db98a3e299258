"""Long texts, tokenised in parts, have the tokens of the whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import UnigramTrainer
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerFast

from kvfold.texts import token_parts as tokens
from kvfold.texts.corpus import read_text
from kvfold.texts.token_parts import read_ids, token_parts

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
TEXT = read_text("stdlib").joined[:60_000] + "\u00e4\u4e2d\U0001f600" * 500


def unigram() -> PreTrainedTokenizerFast:
    """Make a tokenizer by likelihood, which puts a mark before the first word, as SentencePiece does."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = UnigramTrainer(vocab_size=400, show_progress=False, unk_token="?", special_tokens=["?"])
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a hundredth of their size."""
    monkeypatch.setattr(tokens, "PART", 4_000)
    monkeypatch.setattr(tokens, "_OVERLAP", 400)


@pytest.mark.parametrize("make", [lambda: AutoTokenizer.from_pretrained(DEMO), unigram])
def test_parts_have_the_tokens_of_the_whole(make: Callable[[], Any]) -> None:
    tokenizer = make()
    whole = tokenizer(TEXT, add_special_tokens=False, return_offsets_mapping=True)
    parts = list(token_parts(tokenizer, TEXT))
    assert len(parts) == 1 + -(-(len(TEXT) - 4_000) // 3_600)
    assert [token for part in parts for token in part.ids] == whole["input_ids"]
    assert [end for part in parts for end in part.ends] == [end for _, end in whole["offset_mapping"]]


def test_texts_keep_their_order_and_short_ones_are_read_together() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    texts = [TEXT[:3_000], TEXT[:900], TEXT[:9_000], "", "x", TEXT[:4_000]]
    calls: list[Any] = []

    class Counted:
        is_fast = True

        def __call__(self, text: Any, **how: Any) -> Any:
            calls.append(len(text) if isinstance(text, str) else list(map(len, text)))
            return tokenizer(text, **how)

    found = [[token for part in parts for token in part] for parts in read_ids(Counted(), texts)]
    assert found == tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert calls == [[3_000, 900], 4_000, 4_000, 1_800, [0, 1], [4_000]]


def test_parts_that_do_not_agree_grow() -> None:
    """A tokenizer whose tokens depend on where a text begins."""
    calls: list[int] = []

    class FromTheStart:
        is_fast = True

        def __call__(self, text: str, **how: Any) -> BatchEncoding:
            calls.append(len(text))
            places = range(len(text))
            return BatchEncoding(
                {"input_ids": list(places), "offset_mapping": [(place, place + 1) for place in places]}
            )

    (only,) = token_parts(FromTheStart(), "a" * 10_000)
    assert only.ids == list(range(10_000))
    assert calls == [4_000, 4_000, 8_000, 2_400, 10_000]


def test_a_run_longer_than_an_overlap_is_in_one_part() -> None:
    """Without a pre-tokenizer, in whose place Llama's tokenizer has none either."""
    backend = Tokenizer(models.BPE({"a": 0, "aa": 1, "aaa": 2, "b": 3, " ": 4}, [("a", "a"), ("aa", "a")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "ab " * 2_000 + "a" * 5_000 + "b" + "b a" * 5_000
    parts = list(token_parts(tokenizer, text))
    assert [token for part in parts for token in part.ids] == tokenizer(text)["input_ids"]
    assert len(parts) > 3
    assert max(len(part.ids) for part in parts) < 10_000


def test_a_slow_tokenizer_reads_all_at_once() -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, **how: Any) -> BatchEncoding:
            return BatchEncoding({"input_ids": [len(text)]})

    assert list(token_parts(Slow(), "a" * 10_000)) == [([10_000], [])]
