"""Loss that a quantised cache adds to a fold: `python -m benchmarks.quantised_cache MODEL --text FILE`.

Each layer's cache is quantised when it is written. Rows are folds as they are, the same with what they store
rotated at random, and folds prepared by `--cache-dtype`; each by closed form and refined. A number is the
divergence from the source, in nats per token, above that of the same fold, unprepared, with an unquantised
cache. So it includes what a preparation costs elsewhere.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.refinement import STEPS
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.cache_dtypes import cache_dtype
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.models.causal_lm import load_model, load_tokenizer
from kvfold.models.stored_cache import StoredCache
from kvfold.texts.corpus import read_text

from .machine import RESULTS, save

DTYPES = ("fp8_e4m3", "nvfp4", "int4", "int8")
ROWS = {
    "refined": (STEPS, False, False),
    "refined, rotated at random": (STEPS, False, True),
    "refined, prepared": (STEPS, True, False),
    "closed form": (0, False, False),
    "closed form, rotated at random": (0, False, True),
    "closed form, prepared": (0, True, False),
}  # steps of refinement, whether it is prepared, whether it is rotated
BATCH = 8
Cell = dict[str, float]


class RotatedCache(StoredCache):
    """A cache whose latents, or whose values of each head, are rotated at random while they are stored."""

    def write(self, number: int, module: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer writes as it will be read; arguments are those of `StoredCache`."""
        if getattr(module, "kv_lora_rank", None):
            turn = random_rotation(first.shape[-1])
            first, second = super().write(number, module, first @ turn.mT, second)
            return first @ turn, second
        turn = random_rotation(second.shape[-1])
        first, second = super().write(number, module, first, second @ turn.mT)
        return first, second @ turn


def random_rotation(width: int) -> Tensor:
    """Return an orthogonal matrix drawn uniformly, the same for the same width."""
    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(7))
    basis, upper = torch.linalg.qr(drawn)
    rotation: Tensor = basis * upper.diagonal().sign()
    return rotation


@torch.no_grad()
def log_probabilities(
    directory: Path, windows_BT: Tensor, dtype: str = "bfloat16", *, rotate: bool = False
) -> Tensor:
    """Return a model's log-probabilities (B, T, V), float32, with its cache in a format.

    Args:
        directory: the checkpoint.
        windows_BT: tokens.
        dtype: format of the cache; bfloat16 leaves it in float32, so that rounding adds nothing.
        rotate: whether what is stored is rotated at random: a latent, or the values of each head.
    """
    model = load_model(directory)
    if dtype != "bfloat16":
        (RotatedCache if rotate else StoredCache)(model, cache_dtype(dtype))
    return torch.cat([model(part_BT).logits.float().log_softmax(-1) for part_BT in windows_BT.split(BATCH)])


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A source whose folds are measured.

    Attributes:
        directory: the checkpoint.
        statistics: of the source.
        windows_BT: tokens of the evaluation.
        source_BTV: the source's log-probabilities of them.
        request: target and budget.
        work: a directory for folds; those of a stopped run are there.
    """

    directory: Path
    statistics: Statistics
    windows_BT: Tensor
    source_BTV: Tensor
    request: Mapping[str, Any]
    work: Path

    def folded(self, steps: int, dtype: str) -> Path:
        """Return a fold, made for a cache of a format."""
        out = self.work / f"{steps}-{dtype}"
        if not out.exists():
            asked = {"model": str(self.directory), "refine": steps, "cache_dtype": dtype, **self.request}
            asked["context"] = self.windows_BT.shape[1]
            rewrite(make_plan(self.directory, fold_request(asked), self.statistics), out)
        return out

    def score(self, out: Path, dtype: str = "bfloat16", *, rotate: bool = False) -> Cell:
        """Return divergence from the source and perplexity of a fold with its cache in a format."""
        found_BTV = log_probabilities(out, self.windows_BT, dtype, rotate=rotate)
        divergence = (self.source_BTV.exp() * (self.source_BTV - found_BTV)).sum(-1).mean()
        chosen = found_BTV[:, :-1].gather(-1, self.windows_BT[:, 1:, None])
        return {"kl": float(divergence), "perplexity": float((-chosen.mean()).exp())}

    def measure(
        self,
        labels: Iterable[str],
        dtypes: Iterable[str],
        rows: dict[str, dict[str, Cell]],
        keep: Callable[[], None],
    ) -> None:
        """Fill in the cells of some rows and formats that are missing; `keep` is called after each."""
        for label in labels:
            steps, prepared, rotate = ROWS[label]
            row = rows.setdefault(label, {})
            plain = rows[label.partition(",")[0]]
            for dtype in ("bfloat16", *dtypes):
                if dtype in row or (dtype == "bfloat16" and (prepared or rotate)):
                    continue
                out = self.folded(steps, dtype if prepared else "bfloat16")
                row[dtype] = self.score(out, dtype, rotate=rotate)
                if prepared:
                    row[dtype]["unquantised_kl"] = self.score(out)["kl"]
                row[dtype]["added"] = row[dtype]["kl"] - plain["bfloat16"]["kl"]
                click.echo(f"{label}, {dtype}: {row[dtype]}", err=True)
                keep()


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--to", type=click.Choice(("gqa", "mla")), default="mla", show_default=True)
@click.option("--kv-budget", default="25%", show_default=True)
@click.option(
    "--latent-norm", type=click.Choice(("auto", "fitted", "linear")), default="auto", show_default=True
)
@click.option("--calibration", default="self", show_default=True, help="As for kvfold convert.")
@click.option("--sequences", default=48, show_default=True, help="Calibration sequences.")
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option("--window", default=256, show_default=True)
@click.option("--windows", default=32, show_default=True, help="Spread evenly over the text.")
@click.option("--work", type=click.Path(path_type=Path), help="Directory that keeps the folds.")
@click.option("--name", required=True, help="Key of the results in benchmarks/results/quantised-cache.json.")
@click.option("--revision", required=True, help="The commit of kvfold, for the results.")
@click.option("--only", help="Rows whose name begins so; by default all.")
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="A format; by default all.")
def main(
    model: str,
    text: str,
    to: str,
    kv_budget: str,
    latent_norm: str,
    calibration: str,
    sequences: int,
    length: int,
    window: int,
    windows: int,
    work: Path | None,
    name: str,
    revision: str,
    only: str | None,
    dtypes: tuple[str, ...],
) -> None:
    """Print and save what a quantised cache adds to a fold's divergence from its source.

    Cells that the results have are kept, so that a stopped run resumes.
    """
    directory = resolve(model)
    statistics = study(open_source(directory), calibration, sequences=sequences, length=length, seed=0)
    assert statistics is not None, "a text was asked for"
    tokens = torch.tensor(load_tokenizer(directory)(read_text(text).joined)["input_ids"])
    count = len(tokens) // window
    chosen = torch.linspace(0, count - 1, min(windows, count)).long()
    windows_BT = tokens[: count * window].view(count, window)[chosen]
    request = {"to": to, "kv_budget": kv_budget}
    if latent_norm != "auto":
        request["latent_norm"] = latent_norm
    protocol = {"text": Path(text).name, "window": window, "windows": len(chosen)}
    calibrated = [statistics.tokens, length, statistics.seed]
    described = {"revision": revision, **protocol, **request, "calibration": calibrated}
    found = _begun(name, described)
    with tempfile.TemporaryDirectory() as scratch:
        trial = Trial(
            directory=directory,
            statistics=statistics,
            windows_BT=windows_BT,
            source_BTV=log_probabilities(directory, windows_BT),
            request=request,
            work=work or Path(scratch),
        )
        rows = [row for row in ROWS if row.startswith(only or "")]
        trial.measure(rows, dtypes or DTYPES, found["rows"], lambda: _save(name, found))
    _show(name, found["rows"])


def _show(name: str, rows: Mapping[str, dict[str, Cell]]) -> None:
    cells = [
        (
            label,
            *(
                f"{row[dtype][key]:.4g}" if dtype in row else ""
                for key in ("added", "perplexity")
                for dtype in DTYPES
            ),
        )
        for label, row in rows.items()
    ]
    show_table(f"{name}: nats added, and perplexity", ("", *DTYPES, *DTYPES), cells)


def _begun(name: str, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a run by the same protocol, or new ones.

    Raises:
        InvalidInput: the name stands for another run.
    """
    file = RESULTS / "quantised-cache.json"
    saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"models": {}}
    found: dict[str, Any] = saved["models"].get(name, {**described, "rows": {}})
    if {key: found.get(key) for key in described} != described:
        raise InvalidInput(
            f"{file} has {name} by {found}; this run is another: {described}; use another --name"
        )
    return found


def _save(name: str, found: dict[str, Any]) -> None:
    """Write one model's results, and leave those of others as another run may have changed them."""
    file = RESULTS / "quantised-cache.json"
    saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"models": {}}
    save("quantised-cache", {"models": {**saved["models"], name: found}})


if __name__ == "__main__":
    main()
