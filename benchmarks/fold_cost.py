"""Predicted against found cost of folds: `python -m benchmarks.fold_cost MODEL...`.

Each fold is predicted by `kvfold convert --dry-run` and then made by the same command, each in a process of
its own, on one thread, with clocks around the functions in which phases begin. `--again` only predicts the
saved rows again. `--sizes` predicts folds of models of 1, 8 and 70 billion parameters instead, from their
shapes alone, by the rates in `MACHINES`: of one core, of sixteen such cores, and half of an H100's data
sheet.
Generated models (`hidden x layers`, such as 2048x2) have random weights and a tokenizer of numbers.
"""

import functools
import importlib
import json
import math
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvfold.cli import main as kvfold
from kvfold.convert.decide.fold_cost import cost_of, predict_cost, show_seconds
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.core.console import show_table
from kvfold.core.machine_rates import Rates
from kvfold.core.units import show_bytes

from .generated import generate, timed, write_words
from .machine import RESULTS, save

PLACES = {
    "calibration.study._own_text": "text",
    "calibration.study._within_reach": "text",
    "calibration.study._collect": "statistics",
    "decide.draft.choose_slots": "closed form",
    "settle.preparation.settle": "measured choices",
    "write.rewrite.fold": "closed form",
    "layer.finish._with_rounded_length": "rounded length",
    "layer.finish._fitted": "refinement",  # or, without steps, the output projection and a measurement
    "layer.finish._prepared": "quantised cache",
}
# Phases that hold functions of others, and the phase that all their time is given to; the first that is open
# counts.
WHOLE = {"quantised cache": "quantised cache", "measured choices": "closed form"}


class Clock:
    """CPU seconds of this process by phase, each without the phases inside it."""

    def __init__(self) -> None:
        self.found = defaultdict[str, float](float)
        self._open, self._last = ["start"], 0.0

    def turn(self) -> None:
        """Give the time since the last turn to the phase that is open."""
        # The choices of a width and a norm fold some layers by their closed form, and what is prepared for a
        # format is refined again, with the same functions.
        phase = next((WHOLE[phase] for phase in WHOLE if phase in self._open), self._open[-1])
        now = time.process_time()
        self.found[phase] += now - self._last
        self._last = now

    def watch(self, place: str, phase: str) -> None:
        """Count a function's time to a phase."""
        name, _, attribute = place.rpartition(".")
        module = importlib.import_module(f"kvfold.convert.{name}")
        function = getattr(module, attribute)

        @functools.wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            self.turn()
            self._open.append(phase)
            try:
                return function(*given, **named)
            finally:
                self.turn()
                self._open.pop()

        setattr(module, attribute, timed)


def watch(file: Path, words: list[str]) -> None:
    """Run a command of kvfold, and write the CPU seconds of its phases; what is in no other is the start."""
    clock = Clock()
    for place, phase in PLACES.items():
        clock.watch(place, phase)
    kvfold(words, standalone_mode=False)
    clock.turn()
    file.write_text(json.dumps({phase: round(value, 2) for phase, value in clock.found.items()}))


def measure(command: list[str], out: Path) -> dict[str, Any]:
    """Predict and make one fold; return both costs.

    Args:
        command: `convert` and its arguments, without an output.
        out: the output, which is removed.
    """
    python = [sys.executable, "-m"]
    dry = subprocess.run(
        [*python, "kvfold", *command, "--dry-run", "--json"], capture_output=True, check=True, text=True
    )
    predicted = json.loads(dry.stdout)["fold"]
    phases = out.with_name("phases.json")
    watched = [*python, "benchmarks.fold_cost", "--watched", str(phases), *command]
    found = timed([*watched, "--verify", "none", "--out", str(out)])
    shutil.rmtree(out)
    return {
        "predicted_seconds": predicted["seconds"],
        "found_cpu_seconds": found["cpu_seconds"],
        "time_ratio": round(predicted["seconds"] / found["cpu_seconds"], 2),
        "predicted_mb": round(predicted["peak_bytes"] / 1e6),
        "found_mb": found["peak_mb"],
        "memory_ratio": round(predicted["peak_bytes"] / 1e6 / found["peak_mb"], 2),
        "phases": predicted["phases"],
        "found_phases": json.loads(phases.read_text(encoding="utf-8")),
        "load": round(os.getloadavg()[0], 1),
    }


def options_of(given: str) -> dict[str, str]:
    """Return options of `kvfold convert` as fields of a request."""
    words = [word.removeprefix("--").replace("-", "_") for word in shlex.split(given)]
    return dict(zip(words[::2], words[1::2], strict=True))


def predict_again(row: dict[str, Any], model: Path, given: str) -> dict[str, Any]:
    """Return a row with its cost predicted by the present counts."""
    plan = make_plan(model, fold_request({"model": str(model), "jobs": 1, **options_of(given)}))
    cost = cost_of(plan).to_dict()
    return {
        **row,
        "predicted_seconds": cost["seconds"],
        "time_ratio": round(cost["seconds"] / row["found_cpu_seconds"], 2),
        "predicted_mb": round(cost["peak_bytes"] / 1e6),
        "memory_ratio": round(cost["peak_bytes"] / 1e6 / row["found_mb"], 2),
        "phases": cost["phases"],
    }


SHAPES: dict[str, dict[str, int]] = {  # of Llama 3.2 1B, Llama 3.1 8B and 70B
    "1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
}
VOCABULARY, KEY_HEADS, POSITIONS = 128_256, 8, 131_072
CORES, SHARED = 16, 0.8  # and the share of their rates that products on all of them reach
# One core of a virtual machine, by CPU time with a hidden size of 2,048, 2026-11-28, next to other work.
CORE = Rates(products=99e9, decomposition=5.6e9, stream=45e9, call=2e-6, threads=1)
MANY = replace(CORE, products=SHARED * CORE.products, threads=CORES)
# Half of an H100 SXM data sheet: float32 67 TFLOP/s without tensor cores, 3.35 TB/s. What a decomposition
# takes there is a guess.
H100 = Rates(products=33e12, decomposition=1e11, stream=1.7e12, call=1e-5, threads=1)
MACHINES = {"1 core": CORE, f"{CORES} cores": MANY, "H100": H100}


def hollow(directory: Path, shape: dict[str, int]) -> None:
    """Write a Llama checkpoint whose weights are a hole in a file."""
    hidden, wide, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    keys = KEY_HEADS * (hidden // shape["num_attention_heads"])
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (VOCABULARY, hidden) for name in ("model.embed_tokens", "lm_head")
    }
    shapes["model.norm.weight"] = (hidden,)
    for number in range(layers):
        prefix = f"model.layers.{number}."
        for role, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            shapes[f"{prefix}self_attn.{role}_proj.weight"] = (rows, hidden)
        shapes |= {f"{prefix}mlp.{role}_proj.weight": (wide, hidden) for role in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{prefix}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    header: dict[str, Any] = {}
    end = 0
    for name, sides in shapes.items():
        begin, end = end, end + 2 * math.prod(sides)
        header[name] = {"dtype": "BF16", "shape": sides, "data_offsets": (begin, end)}
    written = json.dumps(header).encode()
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def predict_sizes(options: str, work: Path) -> dict[str, dict[str, Any]]:
    """Return the predicted cost of a fold of every shape on every machine.

    Args:
        options: of `kvfold convert`.
        work: gets the checkpoints.
    """
    rows: dict[str, dict[str, Any]] = {}
    for size, shape in SHAPES.items():
        source = work / size
        if not source.exists():  # other options were predicted for it
            hollow(source, shape)
        plan = make_plan(source, fold_request({"model": str(source), **options_of(options)}))
        rows[size] = {name: predict_cost(plan, "self", rates).to_dict() for name, rates in MACHINES.items()}
    return rows


def save_rows(rows: dict[str, dict[str, Any]]) -> None:
    """Save and show predicted and found costs."""
    path = save("fold-cost", {"threads": os.environ.get("OMP_NUM_THREADS"), "rows": rows})
    columns = ("predicted_seconds", "found_cpu_seconds", "time_ratio", "predicted_mb", "found_mb")
    cells = [(label, *(str(row[column]) for column in columns)) for label, row in rows.items()]
    show_table("predicted and found", ("", *columns), cells)
    click.echo(f"saved in {path}")


@click.command()
@click.argument("models", nargs=-1)
@click.option("--sizes", is_flag=True, help="Predict folds of large models by their shapes instead.")
@click.option(
    "--options", "given", multiple=True, default=("--to mla --kv-budget 25%",), show_default=True,
    help="Of kvfold convert; repeatable.",
)  # fmt: skip
@click.option("--update", is_flag=True, help="Keep the other rows of the results.")
@click.option("--again", is_flag=True, help="Only predict the rows of these models again; nothing is folded.")
@click.option("--work", type=click.Path(path_type=Path), help="Where generated models and outputs go.")
def main(
    models: tuple[str, ...],
    sizes: bool,
    given: tuple[str, ...],
    update: bool,
    again: bool,
    work: Path | None,
) -> None:
    """Print and save predicted and found seconds and memory of folds."""
    if sizes:
        with tempfile.TemporaryDirectory(dir=work) as name:
            found = {options: predict_sizes(options, Path(name)) for options in given}
        for options, table in found.items():
            cells = [
                (
                    size,
                    *(
                        f"{show_seconds(one['seconds'])}, {show_bytes(one['peak_bytes'])}"
                        for one in row.values()
                    ),
                )
                for size, row in table.items()
            ]
            show_table(f"predicted, {options}", ("", *next(iter(table.values()))), cells)
        rates = {name: vars(one) for name, one in MACHINES.items()}
        click.echo(f"saved in {save('fold-cost-sizes', {'rates': rates, 'predicted': found})}")
        return
    kept = RESULTS / "fold-cost.json"
    rows: dict[str, dict[str, Any]] = {}
    if (update or again) and kept.exists():
        rows = json.loads(kept.read_text(encoding="utf-8"))["rows"]
    if again:
        places = {Path(model).name: Path(model) for model in models}
        for label, row in rows.items():
            name, _, options = label.partition(", ")
            if name in places:
                rows[label] = predict_again(row, places[name], options)
        save_rows(rows)
        return
    with tempfile.TemporaryDirectory(dir=work) as name:
        for model in models:
            place, label = Path(model), Path(model).name
            if not place.exists():
                hidden, layers = map(int, model.split("x"))
                place = Path(name) / model
                place.mkdir()
                # In a process of its own: a child's peak counts from what its parent held when it was forked.
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    pool.apply(generate, (place, 0), {"hidden": hidden, "layers": layers})
                    pool.apply(write_words, (place, Path(name) / "text.txt", 1000))
            for options in given:
                command = ["convert", str(place), *shlex.split(options)]
                row = measure([*command, "--jobs", "1"], Path(name) / "out")
                rows[f"{label}, {options}"] = row
                click.echo(f"{label}, {options}: {row}", err=True)
                save_rows(rows)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1:2] == ["--watched"]:
        watch(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
