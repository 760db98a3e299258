"""A tokenizer whose steps multiply a text is refused before it reads one."""

import base64
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvfold import recipes
from kvfold.checkpoints import tokenizer_growth
from kvfold.checkpoints.tokenizer_growth import check_growth, check_tokenizer
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


REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "eee"}
# Steps without their type, each of which tokenizers reads.
UNTYPED = [
    {"normalizers": [REPLACE]},
    {"pattern": {"String": "e"}, "content": "eee"},
    {**REPLACE, "type": "Unknown"},
    {**REPLACE, "type": "Normalizer"},
    {**REPLACE, "type": 7},
    [{"String": "e"}, "eee"],
    ["eee"],
    [[REPLACE]],
]


@pytest.mark.parametrize("step", UNTYPED)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_step_without_its_type(step: Any, is_nested: bool) -> None:
    part = {"type": "Sequence", "normalizers": [step]} if is_nested else step
    content = {**json.loads(Tokenizer(models.BPE()).to_str()), "normalizer": part}
    assert Tokenizer.from_str(json.dumps(content)).normalizer.normalize_str("e").startswith("eee")
    with pytest.raises(InvalidInput, match=r"the normalizer in a has the step .*, which needs a `type`"):
        check_growth(content, Path("a"))


def test_a_decoder_without_its_type() -> None:
    with pytest.raises(InvalidInput, match=r"the decoder in a has the step .*, which needs a `type`"):
        check_growth({"decoder": {"type": "Prepend", "suffix": ""}}, Path("a"))


@pytest.mark.parametrize(
    "part", [None, 1, {"type": "Sequence"}, {**REPLACE, "pattern": {"Regex": "["}, "content": 7}]
)
def test_a_part_that_tokenizers_refuses_is_left_to_it(part: Any) -> None:
    content = {**json.loads(Tokenizer(models.BPE()).to_str()), "normalizer": part}
    check_growth(content, Path("tokenizer.json"))
    if part is not None:
        with pytest.raises(Exception, match=r"invalid|did not match|missing"):
            Tokenizer.from_str(json.dumps(content))


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes of Protocol Buffers."""
    size, length = len(content), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def characters(*texts: str) -> bytes:
    """Return a map of SentencePiece: the length of its tree, a tree of no use, the texts."""
    return (4).to_bytes(4, "little") + bytes(4) + b"".join(text.encode() + b"\0" for text in texts)


def pieces(number: int, mapped: bytes) -> bytes:
    """Return a SentencePiece model with a piece, a group, and a map in the field of a number."""
    piece = field(1, b"\x0a\x01e\x15\0\0\x80\xbf\x18\x02")  # a text, a float, an enumeration
    return piece + b"\x33\x08\x01\x34" + field(number, field(1, b"own") + field(2, mapped))


@pytest.mark.parametrize(("number", "part"), [(3, "normalizer"), (5, "decoder")])
def test_a_map_of_a_sentencepiece_model(number: int, part: str, tmp_path: Path) -> None:
    file = tmp_path / "spiece.model"
    file.write_bytes(pieces(number, characters("a", "\u0635" * 64, "b")))
    check_tokenizer(tmp_path)
    file.write_bytes(pieces(number, characters("a", "\u0635" * 65, "b")))
    with pytest.raises(
        InvalidInput, match=rf"the {part} in .*spiece\.model can make a text more than 64 times"
    ):
        check_tokenizer(tmp_path)


def test_a_file_that_is_no_sentencepiece_model(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    for content in (
        b"",
        b"IQ== 0\nIg== 1\nIw== 2\n",
        b"\xff" * 20,
        b"\x1a\xff",
        b"\x0f",
        b"\x1a\x02\x12\x09",
    ):
        file.write_bytes(content)
        check_tokenizer(tmp_path)
    file.write_bytes(b"\x08\x01" * (10**6 + 1))
    with pytest.raises(InvalidInput, match=r"tokenizer\.model has more than 1,000,000 fields"):
        check_tokenizer(tmp_path)


def test_fields_of_all_messages_of_a_file_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.model").write_bytes(field(3, field(1, b"a") * 9) * 2)
    monkeypatch.setattr(tokenizer_growth, "_MOST_FIELDS", 20)
    check_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_growth, "_MOST_FIELDS", 19)
    with pytest.raises(InvalidInput, match=r"a\.model has more than 19 fields"):
        check_tokenizer(tmp_path)


def test_a_large_map_takes_no_more_memory() -> None:
    """Texts of one character of four bytes, then a long one."""
    mapped = base64.b64encode(characters(*["\U0001f600"] * 50_000, "a" * 300_000)).decode()
    content = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": mapped}}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="more than 64 times"):
            check_growth(content, Path("a"))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(mapped)
    finally:
        tracemalloc.stop()


def test_a_map_of_a_tokenizer_json() -> None:
    def step(*texts: str) -> dict[str, Any]:
        mapped = base64.b64encode(characters(*texts)).decode()
        return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": mapped}}

    check_growth(step("a", "b" * 64), Path("tokenizer.json"))
    check_growth({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, Path("tokenizer.json"))
    with pytest.raises(InvalidInput, match="the normalizer in a can make a text more than 64 times as long"):
        check_growth(step("a", "b" * 65), Path("a"))


def test_a_tokenizer_json_of_another_version(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"fast_tokenizer_files": ["tokenizer.4.0.json", "tokenizer.9999.json"]}')
    check_tokenizer(tmp_path)
    (tmp_path / "tokenizer.4.0.json").write_text(json.dumps(described(MULTIPLYING["replace"])))
    with pytest.raises(InvalidInput, match=r"in .*tokenizer\.4\.0\.json can make a text more than 64 times"):
        check_tokenizer(tmp_path)
    config.write_text('{"fast_tokenizer_files": ["../tokenizer.4.0.json"]}')
    with pytest.raises(InvalidInput, match=r"has '\.\./tokenizer\.4\.0\.json' in fast_tokenizer_files"):
        check_tokenizer(tmp_path)
    for names in ('{"../tokenizer.4.0.json": 1}', '"tokenizer.4.0.json"'):
        config.write_text(f'{{"fast_tokenizer_files": {names}}}')
        with pytest.raises(InvalidInput, match="as fast_tokenizer_files, where a list of names is needed"):
            check_tokenizer(tmp_path)
    (tmp_path / "tokenizer.4.0.json").unlink()
    config.write_text('{"fast_tokenizer_files": null}')
    check_tokenizer(tmp_path)


def template(single: str, ids: int = 1) -> dict[str, Any]:
    """Return a tokenizer with a template, whose special token writes some ids."""
    step = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}}
            if part == "A"
            else {"SpecialToken": {"id": part, "type_id": 0}}
            for part in single
        ],
        "pair": [],
        "special_tokens": {"s": {"id": "s", "ids": [0] * ids, "tokens": ["s"] * ids}},
    }
    return {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, step]}}


def test_templates_of_published_models() -> None:
    check_growth(template("sA"), Path("a"))
    check_growth(template("s" * 30 + "A" + "s" * 30), Path("a"))


@pytest.mark.parametrize("content", [template("A" * 65), template("s" * 65), template("ssA", 32)])
def test_templates_that_multiply(content: dict[str, Any]) -> None:
    sentence = "the post_processor in a can make a text more than 64 times as long"
    with pytest.raises(InvalidInput, match=sentence):
        check_growth(content, Path("a"))
    steps = content["post_processor"]["processors"]
    steps[:] = [template("AA")["post_processor"]] * 7  # each doubles what the one before it made
    with pytest.raises(InvalidInput, match=sentence):
        check_growth(content, Path("a"))


@pytest.mark.parametrize(
    "change", [{"single": None}, {"single": [1, {"SpecialToken": 1}]}, {"special_tokens": {"s": []}}]
)
def test_a_template_that_tokenizers_refuses_is_left_to_it(change: dict[str, Any]) -> None:
    content = {**json.loads(Tokenizer(models.BPE()).to_str()), **template("sA")}
    content["post_processor"]["processors"][1] |= change
    check_growth(content, Path("a"))
    with pytest.raises(Exception, match="did not match"):
        Tokenizer.from_str(json.dumps(content))


def test_a_map_that_is_too_large_to_be_checked(tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(pieces(3, bytes(2**22 + 1)))
    with pytest.raises(InvalidInput, match=r"or is too large to tell .a map of more than 4194304 bytes"):
        check_tokenizer(tmp_path)


def test_it_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["normalizer"] = described(MULTIPLYING["replace"])["normalizer"]
    content["added_tokens"].append({**content["added_tokens"][0], "content": "e", "normalized": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="can make a text more than 64 times as long"):
        load_tokenizer(tmp_path)
