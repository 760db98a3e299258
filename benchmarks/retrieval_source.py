"""A source that finds what a long text hides: `train(DIRECTORY, TEXT)`, 0.75 M parameters, 2,048 positions.

It is trained on a text and on numbers hidden in it, in the words of the suite `retrieval`, with other filler,
numbers and names than the suite's own. The same seed and one thread make the same weights.

A model of this size learns to retrieve in minutes if heads look at distances first, by biases of queries and
keys, if projections of queries and keys begin equal, and those of values and outputs as transposes of each
other (mimetic initialization, Trockman and Kolter 2023, arXiv 2305.09828), and if repeated random tokens come
before any text. docs/notes/calibration.md has what happens without them.

Legend: B windows, S tokens, V vocabulary.
"""

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.core.console import progress
from kvfold.eval.suites.haystack import NAMES

POSITIONS = 2048
VOCABULARY = 2048
SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": POSITIONS, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EOS = "<|end|>"
# Numbers are split after every second digit: a key is three tokens, and each follows from the two before.
_PIECES = r" ?\d{1,2}| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"
_APART = 96  # tokens of text for each hidden number
_MOST = 16  # hidden numbers in a window
_WARMUP = 30  # steps of each stage
_ANSWERS = 8.0  # weight of a token of an answer


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        steps: of the optimizer.
        windows: B.
        length: S.
        repeats: share of the windows that repeat random tokens; the others are text with questions.
        rate: of AdamW, at its begin and at its end.
        plain: one window of text in so many hides one number without a name.
        edges: share of the numbers that are hidden at the head or the end of the text.
        asks: questions for a number without a name.
        restarts: whether AdamW begins anew.
    """

    steps: int
    windows: int
    length: int
    repeats: float
    rate: tuple[float, float]
    plain: int = 8
    edges: float = 0.0
    asks: int = 1
    restarts: bool = False


STAGES = (
    Stage(steps=800, windows=32, length=64, repeats=1.0, rate=(3e-3, 3e-3)),
    Stage(steps=700, windows=12, length=256, repeats=0.25, rate=(3e-3, 3e-3)),
    Stage(steps=400, windows=4, length=1024, repeats=0.15, rate=(3e-3, 2e-3)),
    Stage(steps=900, windows=2, length=2048, repeats=0.0, rate=(2e-3, 1e-4)),
    Stage(
        steps=600, windows=2, length=2048, repeats=0.0, rate=(1e-3, 5e-5), plain=3, edges=0.25, asks=8,
        restarts=True,
    ),
)  # fmt: skip


def make_tokenizer(text: str) -> Any:
    """Return a byte-level BPE tokenizer of `VOCABULARY` tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs = [f"{space}{number:02d}" for space in ("", " ") for number in range(100)]
    again = max(20, len(text) // 3684)  # often enough to be merged first
    chunks = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    tokenizer.train_from_iterator([*chunks, "x".join(pairs * again)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS)


def new_model(vocabulary: int) -> Any:
    """Return a Qwen2 model, float32, initialised as the head of this file says."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    size = SHAPE["hidden_size"]
    config = Qwen2Config(**SHAPE, vocab_size=vocabulary, attn_implementation="sdpa")
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            turns, values = (torch.linalg.qr(torch.randn(size, size))[0] for _ in range(2))
            bias = torch.randn(size)
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight.copy_(turns if number else 0.1 * turns)
                projection.bias.copy_(torch.zeros(size) if number else bias)
            attention.v_proj.bias.zero_()
            attention.v_proj.weight.copy_(0.5 * values)
            attention.o_proj.weight.copy_(0.5 * values.T)
    return model


class Windows:
    """Windows of training.

    Args:
        text: that numbers are hidden in.
        tokenizer: of the questions.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens = np.array(self._ids(text))
        self._vocabulary = len(tokenizer)
        words = dict.fromkeys(re.findall(r"\b[a-z]{4,9}\b", text))
        self._names = [word for word in words if word not in NAMES]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def batch(self, stage: Stage, draw: random.Random) -> tuple[Tensor, Tensor]:
        """Return windows, int64 (B, S), and the weight of each token in the loss, float32 (B, S)."""
        rows = [
            self._repeated(stage.length, draw)
            if number < stage.repeats * stage.windows
            else self._questions(stage, draw)
            for number in range(stage.windows)
        ]
        return torch.tensor([row for row, _ in rows]), torch.tensor([weights for _, weights in rows])

    def row(self, stage: Stage, draw: random.Random) -> list[int]:
        """Return one window of text with questions."""
        return self._questions(stage, draw)[0]

    def text(self, row: list[int]) -> str:
        """Return the text of a window."""
        return str(self._tokenizer.decode(row, skip_special_tokens=True))

    def _repeated(self, length: int, draw: random.Random) -> tuple[list[int], list[float]]:
        """Return random tokens, again and again. Few different ones make longer matches necessary."""
        most = self._vocabulary - 1
        tokens = most if draw.random() < 0.5 else round(12 * (most / 12) ** draw.random())
        alphabet = draw.sample(range(1, most + 1), tokens)
        size = draw.randint(6, min(24, length // 2) if length < 100 else length // 2)
        segment = draw.choices(alphabet, k=size)
        return (segment * (length // size + 1))[:length], [1.0] * length

    def _questions(self, stage: Stage, draw: random.Random) -> tuple[list[int], list[float]]:
        """Return text with hidden numbers, and questions for them behind."""
        length, asks = stage.length, 1
        count = max(1, min(_MOST, length // _APART))
        names = [f" of the {name}" for name in draw.sample(self._names, count)]
        if draw.randrange(stage.plain) == 0:
            names, asks = [""], stage.asks
        facts, room = [], length - 1
        for name in names:
            key = str(draw.randrange(10_000, 100_000))
            remember = "" if name else f" Remember: the secret number is {key}."
            question, answer = self._ids(f"\nThe secret number{name} is"), self._ids(f" {key}")
            fact = self._ids(f" The secret number{name} is {key}.{remember}")
            size = len(fact) + asks * len(question + answer)
            if room < size:
                break
            room -= size
            facts.append((fact, question, answer))
        inserted: list[tuple[int, int, list[int], int]] = []  # place, order there, tokens, those of an answer
        for number, (fact, question, answer) in enumerate(facts):
            first = draw.randint(0, room)
            if stage.edges and draw.random() < stage.edges:
                first = draw.choice((0, room))
            inserted.append((first, number, fact, 0))
            for _ in range(asks):
                last = room if draw.random() < 0.5 else draw.randint(first, room)
                order = count + draw.randrange(count) * count + number  # behind all facts of the same place
                inserted.append((last, order, question + answer, len(answer)))
        start = draw.randrange(len(self.tokens) - length)
        text = self.tokens[start : start + room].tolist()
        row, weights, at = [0], [1.0], 0
        for place, _, tokens, asked in sorted(inserted):
            row += text[at:place] + tokens
            weights += [1.0] * (place - at + len(tokens) - asked) + [_ANSWERS] * asked
            at = place
        row += text[at:]
        weights += [1.0] * (room - at)
        return row, weights


def steps(model: Any, windows: Windows, stages: tuple[Stage, ...] = STAGES) -> Iterator[dict[str, float]]:
    """Train, and yield after each step the loss of all tokens and the share of right answers."""
    draw = random.Random(0)
    model.train()
    optimizer = None
    for stage in stages:
        if optimizer is None or stage.restarts:
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        begin, end = stage.rate
        for number in range(stage.steps):
            rate = begin * (end / begin) ** (number / stage.steps) * min(1.0, (number + 1) / _WARMUP)
            optimizer.param_groups[0]["lr"] = rate
            row_BS, weight_BS = windows.batch(stage, draw)
            logits_BSV = model(input_ids=row_BS, use_cache=False).logits[:, :-1]
            next_BS, weight_BS = row_BS[:, 1:], weight_BS[:, 1:]
            loss_BS = cross_entropy(logits_BSV.flatten(0, 1), next_BS.flatten(), reduction="none")
            loss_BS = loss_BS.view_as(next_BS)
            ((loss_BS * weight_BS).sum() / weight_BS.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            asked_BS = weight_BS > 1
            right = (logits_BSV.argmax(-1) == next_BS)[asked_BS].float().mean()
            yield {"length": stage.length, "loss": float(loss_BS.detach().mean()), "right": float(right)}


def train(directory: Path, text: str, stages: tuple[Stage, ...] = STAGES) -> None:
    """Train the source on a text and write it; the directory appears when it is whole."""
    tokenizer = make_tokenizer(text)
    windows, model = Windows(text, tokenizer), new_model(len(tokenizer))
    total = sum(stage.steps for stage in stages)
    for _ in progress(steps(model, windows, stages), "Training a source that retrieves", total):
        pass
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    as_llama(model).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.replace(directory)


def as_llama(model: Any) -> Any:
    """Return the same model in the class of Llama, whose checkpoints may have any tokenizer.

    transformers splits text for Qwen2 as Qwen2 does, whatever the tokenizer of the checkpoint says.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=model.config.vocab_size, attention_bias=True))
    for layer in llama.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)  # Qwen2 has none
    llama.load_state_dict(model.state_dict(), strict=False)
    return llama
