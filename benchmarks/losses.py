"""Time and memory of a loss over the vocabulary: `python -m benchmarks.losses --tokens 8192 --vocabulary
128256 --hidden 4096`.

Forward and reverse KL, forward and backward pass, with gradients of hidden states and head: kvfold's chunked
form at several chunk sizes, the dense form, which is what torch.nn.functional gives, and on a GPU Liger's
fused form where it is installed. Weights are float32, computed with in bfloat16 by autocast on a GPU. Every
run is a process of its own; the kinds alternate, and medians are kept. Memory is the peak above the hidden
states and heads of student and teacher; both gradients are in it. Seconds are the clock's on a GPU, and the
processor's on a CPU, where other work on the machine must not count.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import click
import psutil
import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear, log_softmax

from kvfold.core.system_calls import peak_resident_bytes
from kvfold.distill.losses.chunks import chunk_elements
from kvfold.distill.losses.predictions import Predictions
from kvfold.distill.losses.vocabulary import mix

from .machine import machine, save

DENSE, LIGER = "dense", "liger"


def dense(name: str, student: Predictions, teacher: Predictions) -> Tensor:
    """The loss on whole logits."""
    log_q_TV = log_softmax(linear(student.hidden_TD, student.weight_VD).float(), -1)
    with torch.no_grad():
        log_p_TV = log_softmax(linear(teacher.hidden_TD, teacher.weight_VD).float(), -1)
    ours, theirs = (log_q_TV, log_p_TV) if name == "kl" else (log_p_TV, log_q_TV)
    return kl_div(ours, theirs, reduction="sum", log_target=True)


def liger(name: str, student: Predictions, teacher: Predictions) -> Tensor:
    """Return Liger's fused loss; its beta 0 is forward KL, 1 is reverse KL (H hidden states, W head)."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    student_H, student_W, teacher_H, teacher_W = (
        tensor.bfloat16()
        for tensor in (student.hidden_TD, student.weight_VD, teacher.hidden_TD, teacher.weight_VD)
    )
    fused = LigerFusedLinearJSD(jsd_beta=0.0 if name == "kl" else 1.0)
    mean: Tensor = fused(student_H, student_W, teacher_H, teacher_W, shift_labels=None)
    return mean * len(student_H)


def run(name: str, kind: str, sizes: tuple[int, int, int], device: str) -> dict[str, float]:
    """Seconds of the second of two passes, peak bytes above the inputs, and the loss a token, in this
    process.
    """
    tokens, vocabulary, hidden = sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    student, teacher = (
        Predictions(normal(tokens, hidden), normal(vocabulary, hidden).mul_(2 * hidden**-0.5), None)
        for _ in range(2)
    )
    for tensor in (student.hidden_TD, student.weight_VD):
        tensor.requires_grad_()
    labels_T = torch.zeros(tokens, dtype=torch.int64, device=device)
    clock = time.monotonic if device == "cuda" else time.process_time
    before = _held(device)
    for _ in range(2):
        student.hidden_TD.grad = student.weight_VD.grad = None
        start = clock()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            if kind == DENSE:
                loss = dense(name, student, teacher)
            elif kind == LIGER:
                loss = liger(name, student, teacher)
            else:
                chunk = max(1, int(kind) // vocabulary)
                loss, _ = mix(student, teacher, labels_T, {name: 1.0}, chunk=chunk)
        (loss / tokens).backward()
        value = float(loss.detach()) / tokens  # waits for the device
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - start
    return {"seconds": seconds, "peak_bytes": _peak(device) - before, "nats": value}


def _held(device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(psutil.Process().memory_info().rss)


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


@click.command()
@click.option("--tokens", default=8192, show_default=True)
@click.option("--vocabulary", default=128256, show_default=True)
@click.option("--hidden", default=4096, show_default=True, help="Hidden size of student and teacher.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Runs of each kind.")
@click.option(
    "--chunks", default="20,22,24,25,26,27", show_default=True, help="Logits in a chunk: powers of 2."
)
@click.option("--name", help="Results go to benchmarks/results/losses-NAME.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--once", nargs=2, hidden=True)
def main(
    tokens: int,
    vocabulary: int,
    hidden: int,
    device: str,
    repeats: int,
    chunks: str,
    name: str | None,
    as_json: bool,
    once: tuple[str, str] | None,
) -> None:
    """Print seconds and peak memory of dense and chunked losses."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    sizes = (tokens, vocabulary, hidden)
    if once:
        click.echo(json.dumps(run(*once, sizes, device)))
        return
    of_chunks = [str(2 ** int(power)) for power in chunks.split(",")]
    default = chunk_elements(torch.device(device))
    cells = [("kl", kind) for kind in (DENSE, *of_chunks)] + [
        ("reverse_kl", kind) for kind in (DENSE, str(default))
    ]
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        cells += [("kl", LIGER), ("reverse_kl", LIGER)]
    elif device == "cuda":
        click.echo("liger-kernel is not installed here: its fused losses were not run", err=True)
    runs: dict[tuple[str, str], list[dict[str, float]]] = {cell: [] for cell in cells}
    command = [sys.executable, "-m", "benchmarks.losses", "--device", device]
    command += [
        f"--{key}={value}" for key, value in zip(("tokens", "vocabulary", "hidden"), sizes, strict=True)
    ]
    for _ in range(repeats):
        for cell in cells:
            done = subprocess.run([*command, "--once", *cell], check=True, stdout=subprocess.PIPE, text=True)
            runs[cell].append(json.loads(done.stdout.splitlines()[-1]))
    result: dict[str, Any] = {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "device": device,
        "repeats": repeats,
    }
    result |= {"default_chunk_logits": default, "threads": torch.get_num_threads(), "rows": _rows(runs)}
    if as_json:
        click.echo(json.dumps({"machine": machine(), **result}))
    else:
        for row in result["rows"]:
            click.echo(
                f"{row['loss']:10} {row['kind']:8} {row['chunk_logits'] or '':>10} {row['seconds']:8.3f} s "
                f"({row['times_dense']:.2f} of dense) {row['peak_mb']:9.1f} MB  {row['nats']:.6f} nats a "
                f"token"
            )
    if name:
        click.echo(f"saved in {save(f'losses-{name}', result)}", err=True)


def _rows(runs: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for (loss, kind), own in runs.items():
        # Each run against the dense one of its round: what else the machine does then weighs on both.
        ratios = [
            one["seconds"] / whole["seconds"] for one, whole in zip(own, runs[loss, DENSE], strict=True)
        ]
        rows.append(
            {
                "loss": loss,
                "kind": kind if kind in (DENSE, LIGER) else "chunked",
                "chunk_logits": None if kind in (DENSE, LIGER) else int(kind),
                "seconds": round(statistics.median(one["seconds"] for one in own), 3),
                "times_dense": round(statistics.median(ratios), 2),
                "peak_mb": round(statistics.median(one["peak_bytes"] for one in own) / 1e6, 1),
                "nats": own[0]["nats"],
            }
        )
    return rows


if __name__ == "__main__":
    main()
