"""Against a procedure that keeps the whole model and every activation in memory: `python -m
benchmarks.resident`.

Published converters by activations (TransMLA, arXiv 2502.07864, and what builds on it) load the model, run
the calibration tokens through it, hold what the key and value projections of all layers gave, and decompose
that layer by layer. `resident` here does so in the plainest way, with one decomposition a layer; published
code stores the queries too, finds the rotary basis before and calibrates a second time, so its costs are not
less. Both sides take the same generated model, the same tokens and float32, each in a process of its own, by
turns. `kvfold convert` is run layer by layer and with the whole model in memory, both
without refinement, by weights alone, and refined: what it pays beyond `resident` is the backward pass for
Fisher moments, the second reading of every layer, and the refinement, whose cost is in proportion to its
steps.
"""

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvfold.convert.calibration.study import batch_size
from kvfold.convert.methods.refinement import STEPS
from kvfold.models.causal_lm import load_model, load_tokenizer
from kvfold.texts.documents import read_sequences

from .convert_memory import VOCABULARY, generate, timed
from .machine import save

Cost = dict[str, float]  # seconds, cpu_seconds, peak_mb
RESIDENT, REFINED, WEIGHTS = "resident", "kvfold, layer by layer, refined", "kvfold, weights alone"
FOLDS = {
    "kvfold, layer by layer": ["--layerwise", "--refine", "0"],
    "kvfold, whole model": ["--no-layerwise", "--refine", "0"],
    WEIGHTS: ["--calibration", "none"],
    REFINED: ["--layerwise"],
}


def fold_resident(
    source: Path, text: Path, out: Path, rank: int, sequences: int, length: int
) -> dict[str, float]:
    """The resident procedure; CPU seconds of its steps.

    Legend: X tokens, C rows of both projections, R rank, D hidden size.
    """
    clock = [time.process_time()]
    model = load_model(source)
    clock.append(time.process_time())
    ids = read_sequences(text, load_tokenizer(source), sequences=sequences, length=length, seed=0)
    stored: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            module.register_forward_hook(
                lambda _, __, output_BTC, name=name: stored.setdefault(name, []).append(output_BTC)
            )
    with torch.no_grad():
        for ids_BT in ids.split(batch_size(length)):
            model.get_decoder()(input_ids=ids_BT, use_cache=False)
    clock.append(time.process_time())
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    for layer in range(len(stored) // 2):
        names = [f"model.layers.{layer}.self_attn.{role}_proj" for role in "kv"]
        rows_XC = torch.cat([torch.cat(stored[name]).flatten(0, 1) for name in names], -1).double()
        basis_CR = torch.linalg.eigh(rows_XC.mT @ rows_XC)[1][:, -rank:]
        kv_CD = torch.cat([model.get_submodule(name).weight for name in names]).detach().double()
        prefix = names[0].removesuffix("k_proj")
        state[f"{prefix}down"] = (basis_CR.mT @ kv_CD).to(torch.bfloat16)
        state[f"{prefix}up"] = basis_CR.to(torch.bfloat16).contiguous()
        for name in names:
            del state[f"{name}.weight"]
    clock.append(time.process_time())
    out.mkdir()
    save_file(state, out / "model.safetensors")
    clock.append(time.process_time())
    steps = ("load", "forward", "decompose", "write")
    return {step: round(end - start, 2) for step, start, end in zip(steps, clock, clock[1:], strict=False)}


def write_words(directory: Path, file: Path, tokens: int) -> None:
    """A tokenizer of numbers into a model's directory, and a text of random ones into a file."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    ids = torch.randint(VOCABULARY, (2 * tokens,), generator=torch.Generator().manual_seed(0))
    file.write_text(" ".join(map(str, ids.tolist())), encoding="utf-8")


def compare(root: Path, steps: int, repeats: int, size: dict[str, int]) -> Iterator[dict[str, Any]]:
    """All procedures by turns, the refined fold in the first round only.

    After every round the medians so far.
    """
    source, text, out = root / "source", root / "text.txt", root / "out"
    source.mkdir()
    # In a process of its own: a child's peak counts from what its parent held when it was forked.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(generate, (source, 0), {key: size[key] for key in ("hidden", "layers")})
    write_words(source, text, size["sequences"] * size["length"])
    rounds: list[dict[str, Cost]] = []
    for _ in range(repeats):
        found = {}
        for name, command in commands_of(root, steps, size).items():
            if name == REFINED and rounds:
                continue
            found[name] = timed(command)
            shutil.rmtree(out)
            click.echo(f"{name}: {found[name]}", err=True)
        rounds.append(found)
        own = json.loads((root / "steps.json").read_text(encoding="utf-8"))
        rows = {name: _summary(name, rounds) for name in rounds[0]}
        yield {"repeats": len(rounds), "cpu_seconds_of_resident": own, "rows": rows}


def commands_of(root: Path, steps: int, size: dict[str, int]) -> dict[str, list[str]]:
    """Return the commands to run, by name."""
    rank = ["--rank", str(size["rank"])]
    taken = ["--sequences", str(size["sequences"]), "--length", str(size["length"])]
    convert = [
        sys.executable,
        "-m",
        "kvfold",
        "convert",
        str(root / "source"),
        "--to",
        "mla",
        *rank,
        "--rope-dim",
        "64",
    ]
    convert += ["--jobs", "1", "--verify", "none", "--out", str(root / "out")]
    read = ["--calibration", str(root / "text.txt"), *taken]
    commands = {RESIDENT: [sys.executable, "-m", "benchmarks.resident", "--once", str(root), *rank, *taken]}
    for name, options in FOLDS.items():
        commands[name] = [*convert, *options, *(read if name != WEIGHTS else [])]
    commands[REFINED] += ["--effort", "best", "--refine", str(steps)]
    return commands


def _summary(name: str, rounds: list[dict[str, Cost]]) -> dict[str, float]:
    keys, rounds = ("seconds", "cpu_seconds", "peak_mb"), [found for found in rounds if name in found]
    row = {key: round(median(found[name][key] for found in rounds), 1) for key in keys}
    ratios = {
        f"{key}_over_resident": median(found[name][key] / found[RESIDENT][key] for found in rounds)
        for key in keys
    }
    return row | {key: round(value, 2) for key, value in ratios.items()}


@click.command()
@click.option("--hidden", default=512, show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--rank", default=128, show_default=True)
@click.option("--sequences", default=64, show_default=True)
@click.option("--length", default=128, show_default=True)
@click.option("--steps", default=STEPS, show_default=True, help="Of the refinement.")
@click.option("--repeats", default=3, show_default=True)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Where to put the checkpoints; a temporary directory by default.",
)
@click.option("--once", type=click.Path(path_type=Path), hidden=True)
@click.option("--json", "as_json", is_flag=True)
def main(work: Path | None, once: Path | None, as_json: bool, steps: int, repeats: int, **size: int) -> None:
    """Print and save peak memory and time of both procedures."""
    if once:
        taken = {key: size[key] for key in ("rank", "sequences", "length")}
        found = fold_resident(once / "source", once / "text.txt", once / "out", **taken)
        (once / "steps.json").write_text(json.dumps(found), encoding="utf-8")
        return
    stored = 4 * size["sequences"] * size["length"] * size["layers"] * 2 * size["hidden"]
    about = {**size, "refinement_steps": steps, "threads": os.environ.get("OMP_NUM_THREADS")}
    with tempfile.TemporaryDirectory(dir=work) as name:
        for found in compare(Path(name), steps, repeats, size):
            result = {**about, "stored_activations_mb": round(stored / 1e6), **found}
            path = save("resident", result)
    click.echo(json.dumps(result) if as_json else f"{json.dumps(found, indent=2)}\nsaved in {path}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
