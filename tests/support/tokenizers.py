"""Tokenizers of tiny checkpoints."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_tokenizer(directory: Path, bos: str | None = "<s>", last: str = "end") -> None:
    """Write a tokenizer whose tokens are bytes: BOS before them if there is one, and one more entry."""
    entries = [*([bos] if bos else []), *sorted(pre_tokenizers.ByteLevel.alphabet()), last]
    tokenizer = Tokenizer(models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos).save_pretrained(directory)


def characters() -> PreTrainedTokenizerFast:
    """Make a tokenizer of eight letters and BOS."""
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(["<s>", *"abcdefgh"])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
