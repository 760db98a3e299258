"""Time of decoding from a long cache: `python -m benchmarks.decode --context 4096`; nothing is converted,
weights are random.

Four models of one shape (Llama-2-7B's attention unless told otherwise) take one token a time, in turn, so
that what else the
machine does falls on all: the source's attention as LlamaForCausalLM computes it (mha), its latent fold as
stock DeepseekV3ForCausalLM does, which expands what is cached (expanded), the same after `kvfold.absorb`
(absorbed), and kvfold's own class (remote). All have transformers' usual cache, which grows by concatenation.

"Attention" is an attention module's whole time: projections, growing the cache, and the rest, which is
`core`. Speed-ups are medians of the ratios within a round. With a GPU, `cache_gb_per_s` against
`copy_gb_per_s` says how near core comes to memory.
"""

import json
import statistics
import time
from collections import defaultdict
from typing import Any

import click
import torch
from torch import nn
from transformers import DynamicCache

from kvfold.models.caches import cache_argument

from .decode_models import KINDS, Shape, build, fill
from .machine import machine, save

SWEEP = tuple((context, batch) for context in (512, 2048, 8192, 32768) for batch in (1, 2, 4, 8))
PARTS = ("projections", "cache", "attention")
LEAST_ROUNDS = 3
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Clock:
    """Seconds spent in parts of a model: `start` and `stop` by name, also as hooks around modules."""

    def __init__(self, device: str, kind: str = "wall") -> None:
        self.device = device
        self.kind = kind
        self.seconds: dict[str, float] = defaultdict(float)
        self.started: dict[str, float] = {}

    def start(self, part: str) -> None:
        self._wait()
        self.started[part] = CLOCKS[self.kind]()

    def stop(self, part: str) -> None:
        self._wait()
        self.seconds[part] += CLOCKS[self.kind]() - self.started[part]

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def watch(self, module: nn.Module, part: str) -> None:
        """Time every call of a module."""
        module.register_forward_pre_hook(lambda *_: self.start(part))
        module.register_forward_hook(lambda *_: self.stop(part))


class TimedCache(DynamicCache):
    """The usual cache, which says how long it takes to grow."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.start("cache")
        grown = super().update(*args, **kwargs)
        self.clock.stop("cache")
        return grown


def watched(model: Any, device: str, kind: str) -> Clock:
    """A clock of a model's attention and of the projections in it."""
    clock = Clock(device, kind)
    for layer in model.model.layers:
        clock.watch(layer.self_attn, "attention")
        for name, child in layer.self_attn.named_children():
            if isinstance(child, nn.Linear) and name != "kv_b_proj":  # that one works on what is cached
                clock.watch(child, "projections")
    return clock


@torch.no_grad()
def step(model: Any, clock: Clock, cache: DynamicCache, batch: int) -> dict[str, float]:
    """Milliseconds a token of one decoding step over the whole stack, by part."""
    named = {cache_argument(model): cache}
    clock.seconds.clear()
    clock.start("step")
    model(
        input_ids=torch.zeros(batch, 1, dtype=torch.long, device=clock.device),
        use_cache=True,
        **named,
    )
    clock.stop("step")
    spent = {part: clock.seconds[part] / batch * 1e3 for part in (*PARTS, "step")}
    return {**spent, "core": spent["attention"] - spent["projections"] - spent["cache"]}


def copy_bandwidth(clock: Clock) -> float:
    """Gigabytes read and written a second by a copy that no processor cache holds."""
    source = torch.ones(2**26, device=clock.device)
    target = torch.empty_like(source)
    clock.seconds.clear()
    clock.start("copy")
    target.copy_(source)
    clock.stop("copy")
    return 2 * source.nbytes / clock.seconds["copy"] / 1e9


def measure(
    models: dict[str, Any],
    clocks: dict[str, Clock],
    shape: Shape,
    cell: tuple[int, int],
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """The numbers of one context and batch; no fewer rounds than LEAST_ROUNDS, however long they take."""
    context, batch = cell
    dtype, (device, kept) = (
        next(iter(models.values())).dtype,
        next((one.device, one.kind) for one in clocks.values()),
    )
    caches = {kind: TimedCache(clocks[kind]) for kind in models}
    for kind, cache in caches.items():
        fill(cache, kind, shape, batch, context, dtype, device)
        step(models[kind], clocks[kind], cache, batch)  # warms up
    taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in models}
    bandwidths, start = [], time.monotonic()
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() - start > seconds:
            break
        for kind, model in models.items():
            taken[kind].append(step(model, clocks[kind], caches[kind], batch))
        bandwidths.append(copy_bandwidth(Clock(device, kept)))
    found: dict[str, Any] = {"context": context, "batch": batch, "rounds": len(bandwidths)}
    for fast in ("absorbed", "remote"):
        for slow in ("mha", "expanded"):
            if {fast, slow} <= taken.keys():
                found |= speedups(taken[slow], taken[fast], "" if fast == "absorbed" else f"{fast}_", slow)
    found["ms_per_token"] = {
        kind: {part: round(statistics.median(one[part] for one in ones), 3) for part in ones[0]}
        for kind, ones in taken.items()
    }
    found["cache_gb_per_s"] = {
        kind: round(shape.bytes_per_token(kind, dtype) * context * shape.layers / numbers["core"] / 1e6, 2)
        for kind, numbers in found["ms_per_token"].items()
    }
    return {**found, "copy_gb_per_s": round(statistics.median(bandwidths), 1)}


def speedups(
    slow: list[dict[str, float]], fast: list[dict[str, float]], prefix: str, over: str
) -> dict[str, float]:
    """Medians of the rounds' ratios.

    Of attention, of what is left of it without projections and cache, of whole steps.
    """
    return {
        f"{prefix}{part}_speedup_vs_{over}": round(
            statistics.median(one[part] / other[part] for one, other in zip(slow, fast, strict=True)), 2
        )
        for part in ("attention", "core", "step")
    }


def run(
    shape: Shape, cells: tuple[tuple[int, int], ...], kinds: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """All cells, the ones that need more than `memory_gb` without what does not fit."""
    dtype, device = getattr(torch, options["dtype"]), "cuda" if torch.cuda.is_available() else "cpu"
    models = build(kinds, shape, dtype, device)
    clocks = {kind: watched(model, device, options["clock"]) for kind, model in models.items()}
    found = []
    for context, batch in cells:
        left, fitting = options["memory_gb"] * 1e9, {}
        for kind in sorted(models, key=lambda kind: shape.peak_bytes(kind, batch * context, dtype)):
            left -= shape.peak_bytes(kind, batch * context, dtype)
            if left >= 0:
                fitting[kind] = models[kind]
        fitting = {kind: model for kind, model in models.items() if kind in fitting}
        if not fitting or (len(cells) == 1 and len(fitting) < len(models)):
            needed = sum(shape.peak_bytes(kind, batch * context, dtype) for kind in kinds) / 1e9
            raise click.UsageError(
                f"{batch} x {context} tokens need {needed:.1f} GB in addition to the weights; "
                f"allow --memory-gb {needed + 0.1:.1f}"
            )
        found.append(measure(fitting, clocks, shape, (context, batch), options["rounds"], options["seconds"]))
        click.echo(f"{batch} x {context}: {found[-1]['ms_per_token']}", err=True)
    sizes = {
        **vars(shape),
        "dtype": options["dtype"],
        "device": device,
        "threads": torch.get_num_threads(),
        "clock": options["clock"],
    }
    return {**sizes, **found[0]} if len(cells) == 1 else {**sizes, "cells": found}


CLOCK_HELP = "cpu: this process's own time, for one thread on a machine that does other things too."
_POSITIVE = click.IntRange(min=1)


@click.command()
@click.option("--context", type=_POSITIVE, default=4096, show_default=True, help="Tokens cached.")
@click.option("--batch", type=_POSITIVE, default=1, show_default=True, help="Sequences.")
@click.option("--layers", type=_POSITIVE, default=4, show_default=True)
@click.option("--heads", type=_POSITIVE, default=32, show_default=True)
@click.option("--groups", type=_POSITIVE, help="Key heads of the normed kinds; by default all heads.")
@click.option("--head-dim", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--rank", type=_POSITIVE, default=512, show_default=True, help="Width of the latent.")
@click.option(
    "--rope", type=click.IntRange(min=2), default=64, show_default=True, help="Width of the rotary key."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(list(KINDS)),
    multiple=True,
    default=("mha", "expanded", "absorbed", "remote"),
)
@click.option("--rounds", type=_POSITIVE, default=15, show_default=True, help="Steps of each model.")
@click.option(
    "--seconds", type=float, default=120.0, show_default=True, help="No new round of a cell after that."
)
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True, help=CLOCK_HELP)
@click.option(
    "--memory-gb", type=float, default=8.0, show_default=True, help="For caches and what is made of them."
)
@click.option("--sweep", is_flag=True, help="Contexts 512 to 32k by batches 1 to 8, as far as memory goes.")
@click.option("--name", help="Results go to benchmarks/results/decode-NAME.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    context: int, batch: int, layers: int, heads: int, groups: int | None, head_dim: int, rank: int,
    rope: int, kinds: tuple[str, ...],
    sweep: bool, name: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Print time per decoded token in attention, and how much faster decoding from the latent is."""
    for flag, width in (("--head-dim", head_dim), ("--rope", rope)):
        if width % 2:
            raise click.UsageError(f"{flag} {width} is odd; rotation takes pairs, e.g. {width + 1}")
    if options["clock"] == "cpu" and (torch.get_num_threads() > 1 or torch.cuda.is_available()):
        raise click.UsageError(
            "--clock cpu adds up the time of threads, and does not see a GPU's; set OMP_NUM_THREADS=1, or "
            "use wall"
        )
    shape = Shape(layers=layers, heads=heads, head_dim=head_dim, rank=rank, rope=rope, groups=groups)
    found = run(shape, SWEEP if sweep else ((context, batch),), tuple(dict.fromkeys(kinds)), options)
    if as_json:
        click.echo(json.dumps({**found, "machine": machine()}))
    else:
        for key, value in found.items():
            click.echo(f"{key:32} {value}")
    if name:
        click.echo(f"saved in {save(f'decode-{name}', found)}", err=True)


if __name__ == "__main__":
    main()
