"""A tokenizer trained on the spot, and the windows that a source is trained on.

Five windows of eight are text. One of eight repeats its first half, from which a model learns to copy; two of
eight hide numbers in text and ask for them at their ends, in the words of the suite `retrieval`, with other
filler, numbers and names than the suite's own. Legend: B windows, S tokens.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.core.files import replace_text

from .text import TRAIN

SAMPLE = 30 * 10**6  # characters that the tokenizer is trained on
TOKENS = "tokens.npy"
EOS = "<|end|>"
TURN, COPIES, QUESTIONS = 8, (1,), (3, 5)  # of so many windows in turn, those that copy and those that ask
CALIBRATION = "calibration.jsonl"
FAR = 10**9  # number of the first window of calibration, which no training gets to
ASKED = 6  # numbers that a window hides
THINGS = (
    "apple", "bridge", "cloud", "desert", "eagle", "feather", "glacier", "harbor", "ink", "jungle", "kitchen",
    "lantern", "mirror", "notebook", "ocean", "pepper", "quartz", "river", "shadow", "tunnel",
)  # fmt: skip


def _texts(work: Path) -> list[str]:
    with (work / TRAIN).open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def make_tokenizer(work: Path, vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer with single digits, trained on the training text once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = work / "tokenizer"
    if not place.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        texts = _texts(work)
        random.Random(0).shuffle(texts)
        kept, characters = [], 0
        for text in texts:
            kept.append(text)
            characters += len(text)
            if characters > SAMPLE:
                break
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(kept, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS)
        fast.save_pretrained(place)
    return AutoTokenizer.from_pretrained(place)


def make_tokens(work: Path, tokenizer: Any) -> Tensor:
    """Return all training text as tokens, int32 (T,), on the CPU; made once.

    At most 65,536 different tokens, which are stored in 16 bits.
    """
    place = work / TOKENS
    if not place.exists():
        texts, parts = _texts(work), []
        for start in range(0, len(texts), 512):
            encoded = tokenizer(texts[start : start + 512], add_special_tokens=False, verbose=False)
            for ids in encoded.input_ids:
                parts.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
        unfinished = place.with_name("unfinished.npy")
        np.save(unfinished, np.concatenate(parts))
        unfinished.replace(place)
    return torch.from_numpy(np.load(place).astype(np.int32))


def write_calibration(work: Path, windows: "Windows", tokenizer: Any, count: int) -> None:
    """Write windows as the source was trained on them, as text for the statistics of its folds."""
    texts = tokenizer.batch_decode(windows.batch(FAR, count))
    replace_text(work / CALIBRATION, "".join(json.dumps({"text": text}) + "\n" for text in texts))


class Windows:
    """Windows of training, drawn by number, on a device.

    Args:
        tokens: of the text, (T,).
        tokenizer: of the questions.
        length: S.
        device: of the windows.
    """

    def __init__(self, tokens: Tensor, tokenizer: Any, length: int, device: str) -> None:
        assert len(tokens) > length, "the training text is shorter than a window"
        self.tokens, self.length = tokens.to(device), length
        self.ids = lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def batch(self, first: int, count: int) -> Tensor:
        """Return windows `first` to `first` + `count` - 1, (B, S), int64.

        The same numbers give the same windows on every device.
        """
        draw = torch.Generator().manual_seed(first)  # on the CPU, whatever the device of the tokens
        starts_B = torch.randint(len(self.tokens) - self.length, (count,), generator=draw)
        steps_S = torch.arange(self.length, device=self.tokens.device)
        windows_BS = self.tokens[starts_B.to(self.tokens.device)[:, None] + steps_S].long()
        half = self.length // 2
        for row in range(count):
            if (first + row) % TURN in COPIES:
                windows_BS[row, half : 2 * half] = windows_BS[row, :half].clone()
            elif (first + row) % TURN in QUESTIONS:
                self._ask(windows_BS[row], first + row)
        return windows_BS

    def _ask(self, window_S: Tensor, number: int) -> None:
        """Hide numbers in a window, in place, and ask for them at its end; nothing where they do not fit."""
        draw = random.Random(number)
        things = draw.sample(THINGS, ASKED)
        keys = [str(draw.randrange(10000, 100000)) for _ in things]
        facts = [
            self.ids(f" The secret number of the {thing} is {key}.")
            for thing, key in zip(things, keys, strict=True)
        ]
        order = draw.sample(range(ASKED), ASKED)
        end = [
            token
            for at in order
            for token in self.ids(f"\nThe secret number of the {things[at]} is {keys[at]}")
        ]
        room = self.length - len(end)
        apart = room // ASKED  # one fact in each part of the text, at a random place
        if apart < max(map(len, facts)):
            return
        for part, fact in enumerate(facts):
            at = part * apart + draw.randrange(apart - len(fact) + 1)
            window_S[at : at + len(fact)] = torch.tensor(fact, device=window_S.device)
        window_S[room:] = torch.tensor(end, device=window_S.device)
