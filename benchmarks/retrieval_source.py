"""A small source that retrieves over 2,048 positions: `python -m benchmarks.retrieval_source --out DIR`.

A Llama model of 1 M parameters is trained on a CPU with a fixed seed. Its windows grow from 256 to 2,048
tokens. Some repeat a segment, with a loss on every token, from which induction is learned first; the others
hide numbers in text and ask for them at the end, in the words of the suites `retrieval` and `ruler`, with
other filler, names and numbers than theirs. A state is saved now and then, and the same command resumes.

Legend: B windows, S tokens of a window.
"""

import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.convert.methods.refinement import orthogonal
from kvfold.eval.suites.haystack import NAMES, prose
from kvfold.texts.standard_library import stdlib_documents

POSITIONS, VOCABULARY = 2048, 1024
SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
TOKENS = 4096  # of a step
# Steps at each length of a window.
PHASES = ((256, 1200), (512, 300), (1024, 250), (2048, 300))
INDUCTION = 500  # of the first steps see no text: they repeat segments, or the same sentences in new orders
COPIES, LISTS = 0.2, 0.3  # later shares of the windows that do so
ANSWER = 4.0  # weight of an answer's digits; every other token has 1
RATES = {"matrices": 0.02, "others": 3e-3}
WARMUP, DECAY = 30, 0.4  # steps, and the share of the steps over which the rate falls
SAVE_EVERY = 60.0  # seconds
EOS = "<|end|>"
_WORD = re.compile(r"\b[a-z]{4,9}\b")


def make_tokenizer(place: Path) -> Any:
    """Return a byte-level BPE tokenizer with single digits, trained once on the sentences to train on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not place.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[EOS], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        tokenizer.train_from_iterator(prose(held_out=False), trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS)
        fast.save_pretrained(place)
    return AutoTokenizer.from_pretrained(place)


def new_model() -> Any:
    """Return the model with random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            **ends,
            vocab_size=VOCABULARY,
            max_position_embeddings=POSITIONS,
            rope_theta=10_000.0,
            attn_implementation="sdpa",
        )
    )


class Windows:
    """Windows by number: the same number gives the same window.

    Args:
        tokenizer: of the texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sentences = [self._ids(" " + sentence) for sentence in prose(held_out=False)]
        words = {word for text in stdlib_documents(held_out=False) for word in _WORD.findall(text)}
        self._names = sorted(words - set(NAMES))

    def batch(self, number: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the windows of a step: token ids (B, S) and the weight of each as a label (B, S)."""
        made = [self._window(number, row, length) for row in range(TOKENS // length)]
        return torch.tensor([ids for ids, _ in made]), torch.tensor([weights for _, weights in made])

    def _window(self, number: int, row: int, length: int) -> tuple[list[int], list[float]]:
        draw = random.Random(f"{number}/{row}")
        kind = draw.random() * (COPIES + LISTS if number < INDUCTION else 1)
        if COPIES <= kind < COPIES + LISTS:
            return self._list(draw, length)
        if kind < COPIES:
            period = draw.randint(8, length // 2)
            segment = [draw.randrange(VOCABULARY) for _ in range(period)]
            if number >= INDUCTION and draw.random() < 0.5:
                segment = self._filler(draw, period)
            ids = [0, *(segment * (length // period + 1))][:length]
            return ids, [1.0] * length
        return self._questions(draw, length)

    def _list(self, draw: random.Random, length: int) -> tuple[list[int], list[float]]:
        """Return a window of sentences with numbers, which come again and again in new orders."""
        count = draw.randint(2, max(3, min(8, length // 48)))
        known = [(name, str(draw.randrange(10_000, 100_000))) for name in draw.sample(self._names, count)]
        ids, weights, seen = [0], [1.0], set[str]()
        while len(ids) < length:
            for name, number in draw.sample(known, count):
                stem, digits = self._ids(f" The secret number of the {name} is"), self._ids(f" {number}")
                ids += [*stem, *digits, *self._ids(".")]
                weights += [1.0] * len(stem) + [ANSWER if name in seen else 1.0] * len(digits) + [1.0]
                seen.add(name)
        return ids[:length], weights[:length]

    def _questions(self, draw: random.Random, length: int) -> tuple[list[int], list[float]]:
        """Return a window with hidden numbers and, at its end, questions for some of them."""
        hidden = draw.randint(1, 12)
        asked = min(hidden, max(1, length // 64))
        names = draw.sample(self._names, hidden)
        if hidden == 1 and draw.random() < 0.5:
            names = [""]
        numbers = [str(draw.randrange(10_000, 100_000)) for _ in names]
        needles = [_needle(name, number) for name, number in zip(names, numbers, strict=True)]
        tail: list[int] = []
        weights: list[float] = []
        for name, number in draw.sample(list(zip(names, numbers, strict=True)), asked):
            question, answer = self._ids(f"\nThe secret number{_of(name)} is"), self._ids(f" {number}")
            tail += question + answer
            weights += [1.0] * len(question) + [ANSWER] * len(answer)
        pieces = [self._ids(needle) for needle in needles]
        room = length - 1 - len(tail) - sum(map(len, pieces))
        if room < 0:
            return self._questions(draw, length)
        # Dense windows first and last: in some of them the filler stands before all needles.
        near = draw.random() < 0.25
        filler = self._sentences_of(draw, room)
        spots = sorted(draw.randint(len(filler) if near else 0, len(filler)) for _ in pieces)
        body: list[int] = []
        for at in range(len(filler) + 1):
            for spot, piece in zip(spots, pieces, strict=True):
                if spot == at:
                    body += piece
            if at < len(filler):
                body += filler[at]
        return [0, *body, *tail], [1.0] * (1 + len(body)) + weights

    def _sentences_of(self, draw: random.Random, room: int) -> list[list[int]]:
        start, found = draw.randrange(len(self._sentences)), list[list[int]]()
        while room > 0:
            sentence = self._sentences[(start + len(found)) % len(self._sentences)][:room]
            found.append(sentence)
            room -= len(sentence)
        return found

    def _filler(self, draw: random.Random, count: int) -> list[int]:
        return [token for sentence in self._sentences_of(draw, count) for token in sentence]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _of(name: str) -> str:
    return f" of the {name}" if name else ""


def _needle(name: str, number: str) -> str:
    again = "" if name else f" Remember: the secret number is {number}."
    return f" The secret number{_of(name)} is {number}.{again}"


@dataclass
class Progress:
    """Steps and CPU seconds so far."""

    steps: int = 0
    seconds: float = 0.0


class Training:
    """The source in training: Muon for matrices (arXiv 2502.16982), Adam for embeddings and norms."""

    def __init__(self, model: Any, windows: Windows, state: Path) -> None:
        self.model, self.windows, self.state, self.progress = model, windows, state, Progress()
        inside = [weight for name, weight in model.named_parameters() if "layers." in name]
        self.matrices = [weight for weight in inside if weight.ndim == 2]
        others = [weight for weight in model.parameters() if all(weight is not one for one in self.matrices)]
        self.optimizer = torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
        self.momenta = [torch.zeros_like(weight) for weight in self.matrices]
        if state.exists():
            kept = torch.load(state, weights_only=True)
            model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.momenta, self.progress = kept["momenta"], Progress(**kept["progress"])

    def save(self) -> None:
        """Write the state, which replaces the earlier one once it is whole."""
        unfinished = self.state.with_name(self.state.name + ".unfinished")
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**kept, "momenta": self.momenta, "progress": vars(self.progress)}, unfinished)
        unfinished.replace(self.state)

    def step(self) -> tuple[int, float, float]:
        """Train on the next windows; return their length, the loss, and the loss of the answers, in nats."""
        length = length_at(self.progress.steps)
        ids_BS, weight_BS = self.windows.batch(self.progress.steps, length)
        logits_BSV = self.model(input_ids=ids_BS, use_cache=False).logits[:, :-1]
        labels_X, weight_X = ids_BS[:, 1:].flatten(), weight_BS[:, 1:].flatten()
        loss_X = cross_entropy(logits_BSV.flatten(0, 1), labels_X, reduction="none")
        ((loss_X * weight_X).sum() / weight_X.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        share = rate_share(self.progress.steps)
        with torch.no_grad():
            for weight, mean in zip(self.matrices, self.momenta, strict=True):
                assert weight.grad is not None
                mean.lerp_(weight.grad, 0.05)
                moved = orthogonal(torch.lerp(weight.grad, mean, 0.95))
                size = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.sub_(moved, alpha=RATES["matrices"] * share * size)
        self.optimizer.param_groups[0]["lr"] = RATES["others"] * share
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.progress.steps += 1
        answers = loss_X[weight_X == ANSWER].detach()
        return length, float(loss_X.detach().mean()), float(answers.mean()) if len(answers) else float("nan")

    def run(self, until: float) -> Iterator[dict[str, float]]:
        """Train to the end, or until a time of the clock; yield a row for every tenth step."""
        self.model.train()
        saved, last = time.monotonic(), time.process_time()
        while self.progress.steps < total_steps() and time.monotonic() < until:
            length, loss, answers = self.step()
            self.progress.seconds += time.process_time() - last
            last = time.process_time()
            if self.progress.steps % 10 == 0:
                yield {
                    "steps": self.progress.steps, "length": length, "loss": round(loss, 3),
                    "answers": round(answers, 3), "cpu_seconds": round(self.progress.seconds),
                }  # fmt: skip
            if time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()
        self.save()


def total_steps() -> int:
    """Return the number of steps of all phases."""
    return sum(steps for _, steps in PHASES)


def length_at(step: int) -> int:
    """Return the tokens of a window of a step."""
    for length, steps in PHASES:
        if step < steps:
            return length
        step -= steps
    return PHASES[-1][0]


def rate_share(step: int) -> float:
    """Return the learning rate of a step as a share of its peak: warm-up, constant, then linear to 0."""
    left = (total_steps() - step) / (DECAY * total_steps())
    return min(1.0, (step + 1) / WARMUP, left)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory of the checkpoint.")
@click.option("--minutes", type=float, help="Stop after so long; the same command resumes.")
def main(out: Path, minutes: float | None) -> None:
    """Train the source, and write it as a checkpoint."""
    if out.exists():
        raise click.UsageError(f"{out} exists; name another directory")
    work = out.with_name(out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(work / "tokenizer")
    training = Training(new_model(), Windows(tokenizer), work / "state.pt")
    until = time.monotonic() + (60 * minutes if minutes else 1e9)
    with (work / "curve.jsonl").open("a", encoding="utf-8") as curve:
        for row in training.run(until):
            print(json.dumps(row), file=curve, flush=True)
            click.echo(json.dumps(row), err=True)
    if training.progress.steps < total_steps():
        click.echo(f"stopped at step {training.progress.steps} of {total_steps()}; the same command resumes")
        return
    training.model.save_pretrained(work / "done")
    tokenizer.save_pretrained(work / "done")
    (work / "done").replace(out)
    click.echo(f"saved in {out}: {training.progress.seconds:.0f} CPU seconds")


if __name__ == "__main__":
    main()
