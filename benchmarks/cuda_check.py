"""Folds on a GPU in transformers, float32 and bfloat16, under every attention kernel: `python -m
benchmarks.cuda_check`.

In float32 an exact fold must give its source's logits, and decode over its cache as without one; the live
cache must be as large as claimed. In bfloat16, under each attention implementation, a fold may diverge from
itself in float32 by no more than
ten times what its source does from itself: a latent is one more rounding, and a wrong kernel costs a thousand
times as much.

`--device cpu` runs the same on a CPU, which checks this file rather than kernels. Legend: S sequences, T
tokens, V vocabulary.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kvfold.core.console import Command, show_table
from kvfold.core.errors import InvalidInput
from kvfold.engines.probes.probe import PROMPT, compared, greedy_gap, growth, logits, written
from kvfold.engines.verify import EXACT, LENGTH, SEQUENCES, TIE
from kvfold.models.remote_code import carries_own_code

from .folds import Fold, make_folds
from .machine import save

ROUNDED = 10.0  # times the divergence that bfloat16 costs the source; 3.3 was seen on a CPU (demo, MLA)
FLOOR = 1e-6  # nats: a divergence below it is none
TIED = 0.1  # share of the logits' deviation by which greedy tokens may fall short over the cache in bfloat16


def implementations(device: str) -> list[str]:
    """The attention implementations of transformers that can run here."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    flash = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    return ["eager", "sdpa"] + [name for name, there in flash.items() if device == "cuda" and there()]


def load(directory: Path, dtype: torch.dtype, device: str, attention: str) -> Any:
    """Load a checkpoint in eval mode.

    One with kvfold's code by kvfold's own classes, so that none of its files runs.
    """
    from transformers import AutoModelForCausalLM

    from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

    loader = KvfoldForCausalLM if carries_own_code(directory) else AutoModelForCausalLM
    model = loader.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    return model.to(device).eval()


@torch.no_grad()
def run(fold: Fold, source: Path, out: Path, device: str, kernels: list[str]) -> dict[str, Any]:
    """A fold's row: its numbers, and what of them is not as it should be."""
    teacher = load(source, torch.float32, device, "eager")
    text_ST = written(teacher, SEQUENCES, LENGTH, seed=1)
    theirs_STV = logits(teacher, text_ST)
    del teacher
    student = load(out, torch.float32, device, "eager")
    ours_STV = logits(student, text_ST)
    seen = compared(ours_STV, theirs_STV, text_ST)
    row: dict[str, Any] = {"source": fold.source, "options": fold.options, "class": type(student).__name__}
    claimed = json.loads((out / "kvfold.json").read_text(encoding="utf-8"))["cache"]["after"][
        "elements_per_token_per_layer"
    ]
    row["float32"] = {
        "max_difference": seen["max_difference"],
        "kl": seen["kl"],
        "greedy_gap": greedy_gap(student, text_ST[:1, :PROMPT]),
        "cache": growth(student, text_ST[:1]),
        "claimed": claimed,
    }
    del student
    deviation = max(1.0, seen["logit_deviation"])
    failures = [f"float32: {words}" for words in _precise(fold, row["float32"], deviation)]
    row["bfloat16"] = {}
    for kernel in kernels:
        cost = rounding(source, theirs_STV, text_ST, device, kernel)
        found = rounding(out, ours_STV, text_ST, device, kernel)
        row["bfloat16"][kernel] = {**found, "source_kl": cost["kl"]}
        failures += [f"{kernel}: {words}" for words in _rounded(found, cost["kl"], deviation)]
    return row | {"failures": failures}


def rounding(
    directory: Path, precise_STV: Tensor, text_ST: Tensor, device: str, kernel: str
) -> dict[str, float]:
    """Return the divergence of a checkpoint in bfloat16, with an attention kernel, from itself in float32."""
    model = load(directory, torch.bfloat16, device, kernel)
    seen = compared(logits(model, text_ST), precise_STV, text_ST)
    kept = {name: seen[name] for name in ("kl", "same_top1", "max_difference")}
    return kept | {"greedy_gap": greedy_gap(model, text_ST[:1, :PROMPT])}


def _precise(fold: Fold, seen: dict[str, Any], deviation: float) -> list[str]:
    """Return the failures in float32."""
    wrong = []
    if fold.exact and not seen["max_difference"] <= EXACT * deviation:
        wrong.append(f"logits are {seen['max_difference']:.1e} from the source's")
    if not seen["greedy_gap"] <= TIE * deviation:
        wrong.append(f"greedy tokens over the cache fall short by {seen['greedy_gap']:.1e}")
    # Intact latents keep positions where others keep values; Falcon's class caches every query head.
    counted = {keys if fold.rope_intact else keys + values for keys, values in seen["cache"]}
    if fold.source != "gpt_neox" and counted != {seen["claimed"]}:
        wrong.append(f"{sorted(counted)} elements per token and layer are cached, not {seen['claimed']}")
    return wrong


def _rounded(seen: dict[str, float], cost: float, deviation: float) -> list[str]:
    """Return the failures in bfloat16, where rounding costs the source a divergence `cost`."""
    wrong = []
    if not seen["kl"] <= max(ROUNDED * cost, FLOOR):
        wrong.append(f"KL {seen['kl']:.1e} to itself in float32, where rounding costs the source {cost:.1e}")
    if not seen["greedy_gap"] <= TIED * deviation:
        wrong.append(f"greedy tokens over the cache fall short by {seen['greedy_gap']:.1e}")
    return wrong


@click.command(cls=Command)
@click.option("--device", type=click.Choice(("auto", "cuda", "cpu")), default="auto", show_default=True)
@click.option(
    "--only",
    metavar="WORDS",
    default="",
    help="Folds whose source or options contain these words; saves nothing.",
)
def main(device: str, only: str) -> None:
    """Run every fold, print the table; on a GPU save it in benchmarks/results/cuda-check.json."""
    if device != "cpu" and not torch.cuda.is_available():
        if device == "cuda":
            raise InvalidInput(
                "--device cuda: torch sees no CUDA device here; use --device cpu to check the comparison "
                "itself"
            )
        click.echo(
            "torch sees no CUDA device here, so nothing was run; --device cpu runs the comparison on this CPU"
        )
        return
    device = "cuda" if device == "auto" else device
    with tempfile.TemporaryDirectory() as work:
        os.environ["HF_MODULES_CACHE"] = f"{work}/modules"  # before transformers is imported
        from transformers.utils import logging

        logging.disable_progress_bar()
        kernels = implementations(device)
        rows = []
        for fold, source, out in make_folds(Path(work), only):
            rows.append(run(fold, source, out, device, kernels))
            click.echo(
                f"{len(rows)} {fold.source} {fold.options}: {'; '.join(rows[-1]['failures']) or 'ok'}",
                err=True,
            )
    _show(rows, kernels)
    failed = sum(bool(row["failures"]) for row in rows)
    if device == "cuda" and not only and not failed:
        click.echo(f"saved in {save('cuda-check', {'attention': kernels, 'rows': rows})}")
    if device == "cuda" and len(kernels) == 2:
        click.echo("flash-attn is not installed here: its kernels were not run")
    click.echo(f"{len(rows) - failed} passed, {failed} failed")
    if failed:
        raise SystemExit(1)


def _show(rows: list[dict[str, Any]], kernels: list[str]) -> None:
    cells = [
        (
            row["source"],
            row["options"],
            f"{row['float32']['max_difference']:.1e}",
            *(
                f"{row['bfloat16'][kernel]['kl']:.1e} ({row['bfloat16'][kernel]['source_kl']:.1e})"
                for kernel in kernels
            ),
            "FAILS" if row["failures"] else "ok",
        )
        for row in rows
    ]
    columns = ("source", "fold", "logits, float32", *(f"{kernel}: KL (source's)" for kernel in kernels), "")
    show_table("float32 against the source; bfloat16 against itself in float32, nats", columns, cells)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
