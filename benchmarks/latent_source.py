"""Loss of a narrower latent of a source that has latent attention: `python -m benchmarks.latent_source MODEL
--train FILE --text FILE --name NAME`.

No such checkpoint is small, so one is made: MODEL is folded to MLA at half its cache, in the stock class, and
trained on by AdamW, norms included, until it is a model of its own. Its latent is then narrowed to a half and
a quarter by kvfold and in the ways that need no kvfold. All are evaluated in one run on the same windows of
text that took no part; numbers are nats per token above the trained source.

The plain ways choose rows P of the latent and leave queries and outputs alone. Their norm has one weight, the
mean length of P c next to that of c on the training text.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvfold
from kvfold.convert.families.source import Source, open_source
from kvfold.convert.methods.narrowing import source_latents
from kvfold.core.console import show_table
from kvfold.models.causal_lm import load_model
from kvfold.texts.corpus import read_text

from .machine import save

LENGTH, BATCH = 256, 16
SHARES = {"1/2": 2, "1/4": 4}
FOLDS: dict[str, dict[str, Any]] = {
    "kvfold, by weights alone": {"calibration": "none"},
    "kvfold, closed form": {"refine": 0},
    "kvfold": {},
}


def train(directory: Path, out: Path, ids_X: Tensor, steps: int, rate: float) -> None:
    """Train a checkpoint by cross entropy on random windows, and write it without the record of its fold."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").train()
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for step in range(steps):
        starts = torch.randint(len(ids_X) - LENGTH, (BATCH,), generator=draw)
        ids_BT = torch.stack([ids_X[start : start + LENGTH] for start in starts.tolist()])
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 20) * (1 - step / steps)
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(
        directory, out, ignore=shutil.ignore_patterns("kvfold.json", "*.safetensors*", "README.md")
    )
    model.eval().save_pretrained(out)


def plain(source: Source, folded: Path, out: Path, inputs: dict[int, Tensor], way: str) -> None:
    """Write a fold of a source's latent with the rows of one of the plain ways in the place of kvfold's."""
    shutil.copytree(folded, out)
    tensors = load_file(out / "model.safetensors")
    for layer in source.attending:
        place, attention = source.latent_place(layer), source.latent_attention(layer)
        latent_Xr = source_latents(attention, inputs[layer]).flatten(0, 1)
        rows_Mr = torch.cat([attention.k_up_NPC, attention.v_up_NHC], 1).flatten(0, 1)
        rank = len(tensors[f"{place}kv_a_layernorm.weight"])
        if way == "first numbers":
            reduction_Cr = torch.eye(rows_Mr.shape[1]).double()[:rank]
        else:
            root_rr = torch.eye(rows_Mr.shape[1]).double()
            if way == "SVD by activations":
                root_rr = torch.linalg.cholesky(latent_Xr.mT @ latent_Xr / len(latent_Xr) + 1e-6 * root_rr)
            basis_rC = torch.linalg.svd(rows_Mr @ root_rr, full_matrices=False).Vh[:rank].mT
            reduction_Cr = torch.linalg.solve(root_rr.mT, basis_rC).mT
        kept_XC = latent_Xr @ reduction_Cr.mT
        up_rC = torch.linalg.lstsq(kept_XC, latent_Xr).solution.mT
        if way != "SVD by activations":
            up_rC = torch.linalg.pinv(reduction_Cr)
        size = float(kept_XC.square().mean(-1).sqrt().mean())
        assert attention.latent_norm_C is not None
        down_CD = reduction_Cr * attention.latent_norm_C @ attention.down_CD
        rope_RD = source.checkpoint[f"{place}kv_a_proj_with_mqa.weight"][attention.down_CD.shape[0] :]
        made = {
            "kv_a_proj_with_mqa.weight": torch.cat([down_CD, rope_RD.double()]),
            "kv_a_layernorm.weight": torch.full((rank,), size),
            "kv_b_proj.weight": rows_Mr @ up_rC,
        }
        kept = {name.removeprefix(place): source.checkpoint[name] for name in source.reads(layer)}
        tensors |= {place + name: tensor for name, tensor in kept.items() if name not in made}
        tensors |= {place + name: tensor.float().contiguous() for name, tensor in made.items()}
    (out / "model.safetensors").unlink()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def seen_inputs(directory: Path, source: Source, ids_X: Tensor) -> dict[int, Tensor]:
    """Return the inputs (B, T, D) of each layer's attention on the beginning of a text."""
    model, found = load_model(directory), dict[int, Tensor]()
    for layer in source.attending:
        down = model.get_submodule(f"{source.latent_place(layer)}kv_a_proj_with_mqa")
        down.register_forward_pre_hook(lambda _, given, layer=layer: found.update({layer: given[0]}))
    with torch.no_grad():
        model(input_ids=ids_X[: 32 * LENGTH].view(32, LENGTH))
    return found


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--train", "training", required=True, help="Text to train on.")
@click.option("--text", required=True, help="Text to evaluate on.")
@click.option("--name", required=True, help="The result is benchmarks/results/latent-source-NAME.json.")
@click.option("--steps", default=200, show_default=True, help="Steps of training.")
@click.option("--rate", default=1e-3, show_default=True, help="Learning rate.")
def main(model: Path, training: str, text: str, name: str, steps: int, rate: float) -> None:
    """Make a source with latent attention, narrow its latent in every way, and print what each loses."""
    from transformers import AutoTokenizer

    cells: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        kvfold.fold(model, kvfold.MLA(kv_budget="50%"), out=work / "fold", container="stock", effort="quick")
        tokenizer = AutoTokenizer.from_pretrained(model)
        joined = read_text(training).joined[:4_000_000]
        ids_X = torch.tensor(tokenizer(joined, add_special_tokens=False)["input_ids"])
        train(work / "fold", work / "source", ids_X, steps, rate)
        source = open_source(work / "source")
        inputs = seen_inputs(work / "source", source, ids_X)

        def lost(directory: Path, label: str, share: str) -> None:
            found = kvfold.evaluate(
                directory, text=text, teacher=work / "source", suites=("ppl",), max_windows=150
            )
            nats = found["ppl.difference.mean"]
            cells.setdefault(label, {})[share] = round(nats, 5)
            print(f"{label} {share}: {nats:.4f}", flush=True)

        full = source.geometry.key_width
        for share, parts in SHARES.items():
            for number, (label, options) in enumerate(FOLDS.items()):
                out = work / f"{parts}-{number}"
                kvfold.fold(work / "source", kvfold.MLA(rank=full // parts // 2 * 2), out=out, **options)
                lost(out, label, share)
            for way in ("first numbers", "SVD of kv_b", "SVD by activations"):
                out = work / f"{parts}-{way}"
                plain(source, work / f"{parts}-0", out, inputs, way)
                lost(out, way, share)
        about = {
            "source": str(model),
            "steps": steps,
            "latent": full,
            "rotary": source.geometry.cache_elements - full,
        }
    save(f"latent-source-{name}", {**about, "text": text, "nats": cells})
    show_table(
        "nats lost",
        ("", *SHARES),
        [(label, *(f"{row[s]:.4f}" for s in SHARES)) for label, row in cells.items()],
    )


if __name__ == "__main__":
    main()
