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
SPLIT = pre_tokenizers.Split(Regex("."), "isolated")
# Steps as several published models have them.
SOUND = [
    [normalizers.Prepend("\u2581"), Replace(" ", "\u2581")],
    [normalizers.NFC(), Replace(Regex(r"\s+"), " "), normalizers.Lowercase()],
    [Replace("``", '"'), Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents()],
    [normalizers.NFKC(), normalizers.Strip(), Replace(Regex(" {2,}"), " "), normalizers.Prepend("\u2581")],
    [
        *[Replace("``", '"'), Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents()],
        *[normalizers.Lowercase(), normalizers.Precompiled(b"\0\0\0\0"), Replace(Regex(" {2,}"), " ")],
    ],
    [normalizers.BertNormalizer()],
    [Replace(chr(0x3B1 + number % 24), "abcd"[number % 4]) for number in range(200)],
    [Replace("\u2026", "..."), Replace("\u00bd", "1/2"), Replace("\u20ac", "euro"), Replace("\u2122", "tm")],
    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()],
    [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()],
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    [decoders.CTC()],
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
    "spaces": [normalizers.BertNormalizer(), Replace(" ", "\u4e2d")] * 8,
    "decomposed": [normalizers.NFD(), Replace(Regex("e|\u0301"), "\u00e9")] * 10,
    "composed": [normalizers.NFC(), Replace(Regex("[\u05e9\u05bc\u05c1]"), "\ufb2c")] * 10,
    "small letters": [normalizers.Lowercase(), Replace(Regex("i|\u0307"), "\u0130")] * 10,
    "emoji": [normalizers.ByteLevel(), Replace(Regex("."), "\U0001f600")] * 6,
    "chained": [step for a, b in ("xy", "yz", "zx") for step in [Replace(a, b * 3), Replace(b, b * 2)]],
    "next to it": [Replace("e", "xx"), Replace("xy", "e" * 20), Replace("ez", "y" * 20)],
    "pieces": [step for mark in "abcdefghij" for step in [SPLIT, pre_tokenizers.Metaspace(mark, "always")]],
    "spaces of bytes": [SPLIT, pre_tokenizers.ByteLevel(add_prefix_space=True)] * 6,
    "bytes of pieces": [pre_tokenizers.ByteLevel()] * 300,
    "decoded": [decoders.Replace("e", "ee")] * 300,
    "no suffix": [decoders.BPEDecoder("")] * 20,
    "no delimiter": [decoders.CTC("<pad>", "")] * 20,
}


def described(steps: list[Any]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    if isinstance(steps[0], normalizers.Normalizer):
        tokenizer.normalizer = normalizers.Sequence(steps)
    elif isinstance(steps[0], pre_tokenizers.PreTokenizer):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        tokenizer.decoder = decoders.Sequence(steps)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


@pytest.mark.parametrize("steps", SOUND)
def test_steps_of_published_models(steps: list[Any]) -> None:
    check_growth(described(steps), Path("tokenizer.json"))


@pytest.mark.parametrize("steps", MULTIPLYING.values(), ids=MULTIPLYING)
def test_steps_that_multiply(steps: list[Any]) -> None:
    content = described(steps)
    part = next(name for name in ("normalizer", "pre_tokenizer", "decoder") if content[name])
    with pytest.raises(
        InvalidInput, match=rf"the {part} in x/tokenizer\.json can make a text more than 64 times as long"
    ):
        check_growth(content, Path("x/tokenizer.json"))


def test_many_steps() -> None:
    with pytest.raises(InvalidInput, match=r"the normalizer in a has more than 1,000 steps; take"):
        check_growth(described([normalizers.Strip()] * 1001), Path("a"))


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
