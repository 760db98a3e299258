"""Peak memory of scoring above the models: `python -m benchmarks.eval_memory --vocabulary 128256 --windows
16`.

A tiny student and a tiny teacher with that vocabulary read windows of random tokens in a process of its own.
What the process holds when both are loaded is taken off its peak resident set. Dense logits of one batch
would take batch size x window x vocabulary x 4 bytes a model.
"""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import click
import psutil  # type: ignore[import-untyped]
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.core.system_calls import peak_resident_bytes
from kvfold.eval.scores import Live, score
from kvfold.eval.windows import TextWindows
from kvfold.models.causal_lm import Loaded

from .machine import save

HIDDEN, HEADS, LAYERS = 64, 4, 2


def measure(vocabulary: int, windows: int, window: int, batch_size: int, answer: Any) -> None:
    """Score, and put the peak above the models into `answer`."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=window,
    )
    ids_NW = torch.randint(vocabulary, (windows, window), generator=torch.Generator().manual_seed(0))
    scored_NT = torch.ones(windows, window - 1, dtype=torch.bool)
    read = TextWindows("random", "none", window, ids_NW, scored_NT, scored_NT.sum(1))
    models = {
        role: Loaded(Path(role), None, LlamaForCausalLM(config).eval()) for role in ("student", "teacher")
    }
    sources = {role: Live(loaded, read) for role, loaded in models.items()}
    before = psutil.Process().memory_info().rss
    start = time.monotonic()
    score(sources, read, batch_size)
    seconds = time.monotonic() - start
    peak = peak_resident_bytes()
    answer.put(
        {
            "before_mb": before // 10**6,
            "above_mb": (peak - before) // 10**6,
            "tokens_per_second": ids_NW.numel() / seconds,
        }
    )


@click.command()
@click.option("--vocabulary", default=128_256, show_default=True)
@click.option("--windows", default=16, show_default=True)
@click.option("--window", default=2048, show_default=True)
@click.option("--batch-size", default=8, show_default=True)
def main(**size: int) -> None:
    """Measure, print and save."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=measure, kwargs={**size, "answer": answer})
    process.start()
    found = answer.get()
    process.join()
    dense = size["batch_size"] * size["window"] * size["vocabulary"] * 4 // 10**6
    result = {**size, **found, "dense_logits_of_a_model_mb": dense}
    click.echo(f"{found['above_mb']} MB above the models; dense logits of one batch of one model: {dense} MB")
    click.echo(f"saved in {save('eval-memory', result)}")


if __name__ == "__main__":
    main()
