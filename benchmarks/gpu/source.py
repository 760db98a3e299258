"""Sources trained on the spot in a given time: Llama models with grouped-query attention.

Weights and AdamW are float32, products bfloat16 by autocast on a GPU. The learning rate warms up and falls as
a cosine of the share of time that is spent, so that training ends wherever the machine got to. A state is
saved now and then; a stopped training resumes from it. Legend: B windows, S tokens.
"""

import math
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import read_text

from .ledger import Ledger, NotRun, Row
from .sizes import Sizes, SourceSizes
from .text import HELD, write_text
from .tokens import Windows, make_tokenizer, make_tokens, write_calibration

WARMUP = 0.03  # of the time
SAVE_EVERY = 120.0  # seconds between two states
SPENT = 0.6  # of the time of the part goes into training, the rest into text, tokens, writing and evaluation
AFTERWARDS = 20.0  # seconds at the end of a call that are kept for saving a state
BASE: dict[str, Any] = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0}


def new_model(sizes: SourceSizes, tokenizer: Any, window: int) -> Any:
    """Return a Llama model with random weights, float32, on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        **BASE, **sizes.config, **ends, vocab_size=len(tokenizer), max_position_embeddings=window,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rate_at(share: float, peak: float) -> float:
    """Return the learning rate after a share of the time, 0 to 1."""
    if share < WARMUP:
        return peak * max(share, 1e-3) / WARMUP
    return peak * max(0.02, 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARMUP) / (1 - WARMUP)))))


@dataclass
class _Progress:
    steps: int = 0
    seconds: float = 0.0  # of finished steps, over all calls
    micro_batch: int = 1


class Training:
    """One source in training.

    Args:
        sizes: of the model and its batches.
        windows: of the text.
        model: on the device already.
        state: file of its state.
    """

    def __init__(self, sizes: SourceSizes, windows: Windows, model: Any, state: Path) -> None:
        self.sizes, self.windows, self.model, self.state = sizes, windows, model, state
        self.device = next(model.parameters()).device.type
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        others = [weight for weight in model.parameters() if weight.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=sizes.rate, betas=(0.9, 0.95), fused=self.device == "cuda"
        )
        self.progress = _Progress(micro_batch=sizes.micro_batch)
        if state.exists():
            kept = torch.load(state, map_location=self.device, weights_only=True)
            model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.progress = _Progress(**kept["progress"])

    def save(self) -> None:
        """Write the state, which replaces an earlier one when it is whole."""
        unfinished = self.state.with_name(self.state.name + ".unfinished")
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**kept, "progress": vars(self.progress)}, unfinished)
        unfinished.replace(self.state)

    def step(self, rate: float) -> Tensor:
        """Train on the next windows; return the loss, a tensor, so that the GPU is not waited for."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        count = self.sizes.step_windows
        windows_BS = self.windows.batch(self.progress.steps * count, count)
        total = torch.zeros((), device=self.device)
        for part_BS in windows_BS.split(self.progress.micro_batch):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                logits_BSV = self.model(input_ids=part_BS, use_cache=False).logits
            # The last position has no next token; its label is ignored, so that no logits are copied.
            labels_BS = torch.full_like(part_BS, -100)
            labels_BS[:, :-1] = part_BS[:, 1:]
            loss = cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten(), reduction="sum")
            loss = loss / (count * (part_BS.shape[1] - 1))
            loss.backward()
            total += loss.detach()
            del logits_BSV, loss
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.steps += 1
        return total

    def fitting_step(self, rate: float) -> Tensor:
        """Train as `step` does, with half as many windows at once where they do not fit into memory."""
        while True:
            try:
                return self.step(rate)
            except torch.OutOfMemoryError:
                if self.progress.micro_batch == 1:
                    raise
            self.progress.micro_batch //= 2
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            click.echo(f"out of memory: {self.progress.micro_batch} windows at once from now on", err=True)

    def run(self, seconds: float, until: float) -> list[dict[str, float]]:
        """Train until `seconds` of steps are spent over all calls, or until a time of the clock.

        Returns:
            The curve of this call: steps, seconds and loss in nats per token, a line for every tenth step.
        """
        self.model.train()
        curve: list[dict[str, float]] = []
        earlier, start, saved = self.progress.seconds, time.monotonic(), time.monotonic()
        while self.progress.seconds < seconds and time.monotonic() < until:
            loss = self.fitting_step(rate_at(self.progress.seconds / seconds, self.sizes.rate))
            if self.progress.steps % 10 == 0:
                value = float(loss)  # waits for the GPU, so that the clock counts what is done
                if not math.isfinite(value):
                    raise RuntimeError(f"training diverged at step {self.progress.steps}: loss {value}")
                curve.append(
                    {"steps": self.progress.steps, "seconds": round(self.progress.seconds, 1), "loss": value}
                )
            self.progress.seconds = earlier + time.monotonic() - start
            if time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.progress.seconds = earlier + time.monotonic() - start
        return curve


def train(ledger: Ledger, sizes: Sizes, work: Path, device: str, seconds: float) -> None:
    """Make text, tokenizer and tokens, and train every source; rows of the part `train`.

    Args:
        ledger: of the part.
        sizes: of the day.
        work: gets a directory for every source, by its name.
        device: `cuda` or `cpu`.
        seconds: of all trainings together, over all calls.
    """
    if ledger.attempt("text", partial(write_text, work, sizes)) is None:
        return
    if ledger.attempt("tokens", partial(_tokens, sizes, work)) is None:
        return
    for name in sizes.sources:
        ledger.attempt(name, partial(_source, name, ledger, sizes, work, device, seconds))


def _tokens(sizes: Sizes, work: Path) -> Row:
    tokenizer = make_tokenizer(work, sizes.vocabulary)
    tokens = make_tokens(work, tokenizer)
    sequences, length = sizes.calibration
    count = 2 * max(1, sequences * length // sizes.window)  # more than is read
    write_calibration(work, Windows(tokens, tokenizer, sizes.window, "cpu"), tokenizer, count)
    return {"tokens": len(tokens), "vocabulary": len(tokenizer)}


def _source(name: str, ledger: Ledger, sizes: Sizes, work: Path, device: str, seconds: float) -> Row:
    own, out = sizes.sources[name], work / name
    tokenizer = make_tokenizer(work, sizes.vocabulary)
    windows = Windows(make_tokens(work, tokenizer), tokenizer, sizes.window, device)
    training = Training(
        own, windows, new_model(own, tokenizer, sizes.window).to(device), work / f"{name}.state"
    )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    wanted = seconds * sizes.shares[name]
    curve = training.run(wanted, ledger.end - min(AFTERWARDS, 0.1 * wanted))
    training.save()
    if training.progress.seconds < wanted:
        raise NotRun(
            f"{name} was trained for {training.progress.seconds:.0f} of {wanted:.0f} seconds; the "
            "same command resumes it"
        )
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    tokens = own.step_windows * sizes.window
    row = {
        "parameters": sum(weight.numel() for weight in training.model.parameters()),
        "tokens": training.progress.steps * tokens,
        "seconds": round(training.progress.seconds, 1),
        "tokens_per_second": round(training.progress.steps * tokens / training.progress.seconds),
        "micro_batch": training.progress.micro_batch,
        "gpu_mb": None if peak is None else round(peak / 1e6),
        "curve": curve,
    }
    unfinished = work / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    training.model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.replace(out)
    training.state.unlink()
    del training
    return {**row, **quality(out, sizes, work, device)}


def quality(directory: Path, sizes: Sizes, work: Path, device: str) -> Row:
    """Return a source's perplexity on held-out text and its retrieval."""
    count, window = sizes.windows
    options = Options(window=window, max_windows=count, device=device)
    suites = ("ppl", "retrieval")
    result = evaluate(
        directory, None, read_text(str(work / HELD)), options, suites=suites, settings=sizes.retrieval
    )
    return {"perplexity": result.ppl.student.perplexity, "retrieval": retrieved(result)["student"]}


def retrieved(result: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by role and kind of needle, the shares generated right and ranked first."""
    block = result.suites["retrieval"]
    roles = [role for role in ("student", "teacher") if getattr(block, role) is not None]
    return {
        role: {
            kind: {"accuracy": found.overall.accuracy.mean, "choice": found.overall.choice.mean}
            for kind, found in getattr(block, role).items()
        }
        for role in roles
    }
