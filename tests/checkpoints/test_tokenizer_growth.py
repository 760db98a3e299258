"""A tokenizer whose steps multiply a text is refused before it reads one."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvfold import recipes
from kvfold.checkpoints.tokenizer_growth import check_growth
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load_tokenizer

DEMO = Path(recipes.__file__).parent / "demo"
Replace = normalizers.Replace
# Steps as several published models have them.
SOUND = [
    [normalizers.Prepend("\u2581"), Replace(" ", "\u2581")],
    [normalizers.NFC(), Replace(Regex(r"\s+"), " "), normalizers.Lowercase()],
    [Replace("``", '"'), Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents()],
    [normalizers.NFKC(), normalizers.Strip(), Replace(Regex(" {2,}"), " "), normalizers.Prepend("\u2581")],
]
MULTIPLYING = {
    "replace": [Replace("e", "ee")] * 300,
    "once": [Replace("e", "e" * 100)],
    "prepend": [normalizers.Prepend("aa")] * 300,
    "everywhere": [Replace(Regex("|"), "a")] * 300,
    "in front": [Replace(Regex("(?=a)"), "a")] * 300,
    "any": [Replace(Regex("a*?"), "a")] * 300,
    "class": [Replace(Regex(r"\p{L}"), "aa")] * 300,
    "bytes": [normalizers.ByteLevel()] * 300,
    "unicode": [Replace("\ufdfa", "\ufdfa"), normalizers.NFKC()] * 300,
    "nested": [normalizers.Sequence([Replace("e", "ee")] * 20)] * 20,
    "many": [normalizers.BertNormalizer()] * 300,
}


def described(steps: list[Any]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(steps)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


@pytest.mark.parametrize("steps", SOUND)
def test_steps_of_published_models(steps: list[Any]) -> None:
    check_growth(described(steps), Path("tokenizer.json"))


@pytest.mark.parametrize("steps", MULTIPLYING.values(), ids=MULTIPLYING)
def test_steps_that_multiply(steps: list[Any]) -> None:
    with pytest.raises(
        InvalidInput, match=r"normalizer in x/tokenizer\.json can make a text more than 64 times"
    ):
        check_growth(described(steps), Path("x/tokenizer.json"))


def test_other_parts() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 300)
    with pytest.raises(InvalidInput, match="the pre_tokenizer in"):
        check_growth(json.loads(tokenizer.to_str()), Path("tokenizer.json"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("e", "ee")] * 300)
    with pytest.raises(InvalidInput, match="the decoder in"):
        check_growth(json.loads(tokenizer.to_str()), Path("tokenizer.json"))


@pytest.mark.parametrize(
    "part", [None, 1, [], {}, {"type": "Sequence"}, {"type": "Sequence", "normalizers": [1]}]
)
def test_a_part_of_the_wrong_form_is_left_to_its_reader(part: Any) -> None:
    check_growth({"normalizer": part}, Path("tokenizer.json"))
    broken = {"type": "Replace", "pattern": {"Regex": "["}, "content": 7}
    check_growth({"normalizer": broken}, Path("tokenizer.json"))


def test_it_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["normalizer"] = described(MULTIPLYING["replace"])["normalizer"]
    content["added_tokens"].append({**content["added_tokens"][0], "content": "e", "normalized": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="can make a text more than 64 times as long"):
        load_tokenizer(tmp_path)
