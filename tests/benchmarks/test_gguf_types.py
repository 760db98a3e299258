"""The benchmark of GGUF types: sources made for llama.cpp compute and read what their originals do."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.gguf_types import TYPES, byte_letters, medians, spread, with_byte_tokens

from ..support.tiny import make


@pytest.mark.parametrize("tied", [False, True])
def test_a_wider_residual_stream_computes_the_same(tied: bool, tmp_path: Path) -> None:
    source = make(tmp_path / "source", tie_word_embeddings=tied)
    wide = spread(source, tmp_path / "wide", 80)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(ids).logits
            for place in (wide, source)
        )
    assert json.loads((wide / "config.json").read_text())["hidden_size"] == 80
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_sentencepiece_letters_become_bytes_of_gpt_2(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc", "ab"]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "pre_tokenizer": None,
        "normalizer": space, "post_processor": None, "decoder": None,
        "model": {
            "type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [["a", "b"]], "unk_token": "<unk>", "byte_fallback": True,
        },
    }  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(made))
    (source / "tokenizer_config.json").write_text("{}")
    out = with_byte_tokens(source, tmp_path / "out")
    ours, theirs = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (out, source))
    text = "ab c\nab"
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert len(set(byte_letters().values())) == 256

    made["model"]["merges"] = []  # type: ignore[index]
    (source / "tokenizer.json").write_text(json.dumps(made))
    out = with_byte_tokens(source, tmp_path / "without")
    letters = json.loads((out / "tokenizer.json").read_text())["model"]
    assert len(letters["merges"]) == 1
    assert "".join(letters["merges"][0]) in letters["vocab"]
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("c").tokens == ["c"]


def test_medians_are_of_folds_alone() -> None:
    folds = [{f"{kind} / source": one for kind in TYPES} for one in (1.0, 5.0, 2.0)]
    assert medians([{"f16": 0.1}, *folds]) == dict.fromkeys(TYPES, 2.0)
