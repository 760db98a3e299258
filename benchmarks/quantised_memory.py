"""Memory of reading a quantised checkpoint and its bfloat16 twin: `python -m benchmarks.quantised_memory`.

A random Llama of about that size is written in bfloat16, then with random FP8 blocks, GPTQ words or NF4 bytes
in place of its linear weights. Each is run by a process of its own, in turn: `whole` loads the model in
bfloat16 as the evaluation does and runs some tokens, `layers` runs them with one layer in memory at a time,
`fold` is `kvfold convert --method mean`. Peaks are resident sets. transformers maps the files of the
twin into memory, so every page of the weights is read once.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor

from kvfold.checkpoints.directory import Checkpoint
from kvfold.checkpoints.shards import ShardWriter, TensorSpec

from .convert_memory import generate, timed
from .machine import save

BLOCK, GROUP, NESTED = 128, 128, 64
PAGE = 4096  # bytes
WAYS = ("whole", "layers", "fold")
Draw = Callable[[tuple[int, ...]], Tensor]
Parts = dict[str, tuple[torch.dtype, tuple[int, ...], Draw]]  # by the ending after the module's name


def _bytes(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 100, shape, dtype=torch.uint8)  # no NaN of E4M3


def _words(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _small(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape) * 1e-3


def _fp8(rows: int, columns: int) -> Parts:
    blocks = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    return {
        ".weight": (
            torch.float8_e4m3fn,
            (rows, columns),
            lambda shape: _bytes(shape).view(torch.float8_e4m3fn),
        ),
        ".weight_scale_inv": (torch.float32, blocks, _small),
    }


def _gptq(rows: int, columns: int) -> Parts:
    groups = columns // GROUP
    return {
        ".qweight": (torch.int32, (columns // 8, rows), _words),
        ".qzeros": (torch.int32, (groups, rows // 8), _words),
        ".scales": (torch.float16, (groups, rows), _small),
        ".g_idx": (torch.int32, (columns,), lambda shape: (torch.arange(shape[0]) // GROUP).int()),
    }


def _nf4(rows: int, columns: int) -> Parts:
    state = {"quant_type": "nf4", "blocksize": NESTED, "dtype": "bfloat16", "shape": [rows, columns]}
    stored = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        ".weight": (torch.uint8, (rows * columns // 2, 1), _bytes),
        ".weight.absmax": (torch.float32, (rows * columns // NESTED,), _small),
        ".weight.quant_map": (torch.float32, (16,), lambda shape: torch.linspace(-1, 1, shape[0])),
        ".weight.quant_state.bitsandbytes__nf4": (torch.uint8, tuple(stored.shape), lambda _: stored),
    }


FORMATS: dict[str, tuple[Callable[[int, int], Parts], dict[str, object]]] = {
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "nf4": (_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def quantised(twin: Path, out: Path, name: str) -> None:
    """Write a checkpoint with the twin's shapes and random numbers in a format."""
    parts_of, config = FORMATS[name]
    source = Checkpoint(twin)
    parts: Parts = {}
    for tensor in source:
        spec = source.spec(tensor)
        if tensor.endswith("_proj.weight"):
            rows, columns = spec.shape
            module = tensor.removesuffix(".weight")
            parts |= {module + end: part for end, part in parts_of(rows, columns).items()}
        else:
            parts[tensor] = (spec.dtype, spec.shape, lambda shape: torch.randn(shape) * 0.02)
    out.mkdir()
    specs = {key: TensorSpec(dtype, shape) for key, (dtype, shape, _) in parts.items()}
    with ShardWriter(out, specs, 10**9) as writer:
        for key, (_, shape, draw) in parts.items():
            writer.write(key, draw(shape))
    content = json.loads((twin / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**content, "quantization_config": config}))


def run(way: str, directory: Path) -> None:
    """Do the work whose memory is measured; in a process of its own."""
    from kvfold.checkpoints.quantised.packed_checkpoint import open_checkpoint
    from kvfold.models.causal_lm import _read_weights
    from kvfold.models.layered_model import LayeredModel

    ids = torch.arange(8)[None]
    with torch.no_grad():
        if way == "whole":
            from transformers import AutoModelForCausalLM

            options = {"hide_progress": True, "trust_remote_code": False, "dtype": "bfloat16"}
            model = _read_weights(AutoModelForCausalLM, directory, **options)
            model(input_ids=ids)
            for weight in model.parameters():  # every page: transformers maps files and reads what is used
                weight.flatten()[:: PAGE // weight.element_size()].sum()
            return
        layered = LayeredModel(open_checkpoint(directory), dtype=torch.bfloat16)
        with layered.streamed(kept=0) as model:
            model(input_ids=ids)


@click.command()
@click.option("--gigabytes", default=1.0, show_default=True, help="Of the bfloat16 twin.")
@click.option("--work", type=click.Path(path_type=Path), help="Where the checkpoints are made.")
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, default=WAYS, help="Repeatable.")
@click.option("--child", type=(click.Choice(WAYS[:2]), click.Path(path_type=Path)), hidden=True)
def main(gigabytes: float, work: Path | None, ways: tuple[str, ...], child: tuple[str, Path] | None) -> None:
    """Measure, and write benchmarks/results/quantised-memory.json."""
    if child is not None:
        run(*child)
        return
    place = Path(tempfile.mkdtemp(dir=work))
    (place / "twin").mkdir()
    layers = generate(place / "twin", gigabytes)
    for name in FORMATS:
        quantised(place / "twin", place / name, name)
    rows = []
    for way in ways:
        for name in ("twin", *FORMATS):
            command = [sys.executable, "-m", "benchmarks.quantised_memory", "--child", way, str(place / name)]
            if way == "fold":
                command = [sys.executable, "-m", "kvfold", "convert", str(place / name), "--to", "gqa",
                           "--kv-heads", "4", "--method", "mean", "--jobs", "1", "--verify", "none",
                           "--out", str(place / f"{name}-folded")]  # fmt: skip
            cost = timed(command)
            twins = next((row for row in rows if row["way"] == way and row["format"] == "twin"), cost)
            ratio = round(cost["peak_mb"] / float(twins["peak_mb"]), 3)
            rows.append({"way": way, "format": name, **cost, "of_twin": ratio})
            print(rows[-1], flush=True)
    size = sum(file.stat().st_size for file in (place / "twin").glob("*.safetensors"))
    shutil.rmtree(place)
    save("quantised-memory", {"layers": layers, "weights_mb": size // 10**6, "rows": rows})


if __name__ == "__main__":
    main()
