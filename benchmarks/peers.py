"""Peers' own repositories on the tokens and windows of benchmarks.fidelity: `python -m benchmarks.peers MODEL
--text FILE --sweep "ADAPTER DIR" --run "LABEL ADAPTER DIR [setting=value ...]"`.

Nothing of a peer is copied: a run names a clone that the user has, and is a process of its own, with an
interpreter that has the versions the peer needs (`--python`). Adapters are in peer_process.py: `transmla` and
`care` call the converters of fxmeng/TransMLA and FutureMLS-Lab/CARE, `mha2mla` that of JT-Ushio/MHA2MLA,
`xecomla` that of AMD-AIG-AIMA/AMD-Hybrid-Models. mha2gqa is run by its own commands; the adapter `directory`
scores the model that these wrote. Results hold commits and versions.

A sweep tries the settings of peer_settings.py at each share of the cache. Its row is the best of them, chosen
on the evaluation text itself, which favours the peer.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kvfold.convert.algebra.target import Geometry, budget_elements
from kvfold.convert.calibration.self_text import sample_from
from kvfold.convert.families.source import open_source
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.windows import cut
from kvfold.models.causal_lm import load, load_model
from kvfold.texts.corpus import read_text

from .machine import RESULTS, save
from .peer_process import ADAPTERS
from .peer_settings import FURTHER, first_settings

SAME = 1e-6  # relative difference of losses up to which two runs measured one thing


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """A peer at one setting.

    Attributes:
        label: a name for the row.
        adapter: of `peer_process.ADAPTERS`.
        repository: the peer's directory.
        settings: the peer's own options.
    """

    label: str
    adapter: str
    repository: Path
    settings: Mapping[str, Any]


def read_run(text: str) -> PeerRun:
    """Return the run that `LABEL ADAPTER DIR [setting=value ...]` names; a label of several words is quoted.

    Raises:
        InvalidInput: a part is missing, or there is no such adapter or directory.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        raise InvalidInput(f"--run {text!r}: a quote is not closed; close it") from None
    label, adapter, place, *pairs = [*words, "", "", ""][: max(3, len(words))]
    if adapter not in ADAPTERS:
        raise InvalidInput(f"--run {text!r}: no adapter {adapter!r}; choose from {', '.join(ADAPTERS)}")
    if not Path(place).is_dir() or not place:
        raise InvalidInput(f"--run {text!r}: there is no directory {place!r}; clone the repository there")
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise InvalidInput(f"--run {text!r}: {wrong[0]} is no setting; write name=value")
    settings = {name: _value(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    return PeerRun(label=label, adapter=adapter, repository=Path(place).resolve(), settings=settings)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def commit_of(repository: Path) -> str | None:
    """Return the commit of a clone; None for any other directory."""
    asked = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def score(run: PeerRun, model: Path, tokens: Path, python: str) -> dict[str, Any]:
    """Run a peer in a process of its own; return its loss in every window, and versions.

    Raises:
        InvalidInput: the process failed; the last line that it wrote is shown.
    """
    with tempfile.TemporaryDirectory() as name:
        out, job = Path(name) / "out.json", Path(name) / "job.json"
        content = {
            "adapter": run.adapter,
            "repository": str(run.repository),
            "model": str(model.resolve()),
            "settings": dict(run.settings),
            "tokens": str(tokens),
            "out": str(out),
        }
        job.write_text(json.dumps(content), encoding="utf-8")
        process = Path(__file__).with_name("peer_process.py")
        ended = subprocess.run(
            [python, "-P", str(process), str(job)], cwd=name, capture_output=True, text=True, check=False
        )
        if ended.returncode or not out.is_file():
            last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
            raise InvalidInput(f"{run.label}: the peer's process failed: {last}")
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A source, and the windows in which peers are compared with it.

    Attributes:
        model: the source.
        tokens: the file of tokens, as peer_process.py describes it.
        scored: the number of scored tokens.
        python: the interpreter.
    """

    model: Path
    tokens: Path
    scored: int
    python: str

    def source(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of the source in every window (N,), nats, and its row."""
        run = PeerRun(label="source", adapter="source", repository=self.model, settings={})
        own = score(run, self.model, self.tokens, self.python)
        base_N = torch.tensor(own["nll"], dtype=torch.float64)
        return base_N, {"loss": float(base_N.sum()) / self.scored, "versions": own["versions"]}

    def row(self, run: PeerRun, base_N: Tensor) -> dict[str, Any]:
        """Return the row of a peer: nats lost per token against the source in the same windows."""
        found = score(run, self.model, self.tokens, self.python)
        lost_N = torch.tensor(found["nll"], dtype=torch.float64) - base_N
        row = {
            "lost": float(lost_N.sum()) / self.scored,
            "standard_error": float(lost_N.std()) * len(lost_N) ** 0.5 / self.scored,
            "adapter": run.adapter,
            "settings": dict(run.settings),
            "commit": commit_of(run.repository),
            "versions": found["versions"],
        }
        click.echo(f"{run.label} {_written(run.settings)}: {row['lost']:.4f}", err=True)
        return row


def sweep(
    adapter: str, repository: Path, geometry: Geometry, budget: str, bench: Bench, base_N: Tensor
) -> dict[str, Any] | None:
    """Return the row of a peer's best setting at a share of the cache, with all that were tried.

    A setting that the peer's code refuses is printed and left out. None where all are.

    Args:
        adapter: of `peer_settings.SWEEPS`.
        repository: the peer's directory.
        geometry: of the source.
        budget: a share of the cache.
        bench: what is scored.
        base_N: the loss of the source in every window.
    """
    tried: list[dict[str, Any]] = []

    def attempt(settings: Mapping[str, Any]) -> None:
        label = f"{adapter} {budget}"
        run = PeerRun(label=label, adapter=adapter, repository=repository.resolve(), settings=settings)
        try:
            tried.append(bench.row(run, base_N))
        except InvalidInput as reason:
            click.echo(f"{reason} ({_written(settings)})", err=True)

    def best() -> dict[str, Any]:
        return min(tried, key=lambda row: float(row["lost"]))

    for settings in first_settings(adapter, geometry, budget_elements(geometry, budget)):
        attempt(settings)
    if not tried:
        return None
    for further in FURTHER.get(adapter, ()):
        for settings in further(geometry, lambda: best()["settings"]):
            attempt(settings)
    every = {_written(row["settings"]): row["lost"] for row in tried}
    return {**best(), "tried": every}


def joined(earlier: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    """Return the better of two rows of one peer at one share of the cache, with all settings that were tried.

    Args:
        earlier: the row that has the label already; None where there is none.
        row: a new one.
    """
    every = {_written(one["settings"]): one["lost"] for one in (earlier, row) if one is not None}
    every = {**(earlier or {}).get("tried", {}), **row.get("tried", {}), **every}
    best = row if earlier is None or row["lost"] <= earlier["lost"] else earlier
    return {**best, "tried": every}


def _written(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def updated(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Put new rows into the results of an earlier run on the same tokens.

    Raises:
        InvalidInput: the earlier run read other windows or calibration text, or its source scored otherwise.
    """
    file = RESULTS / f"peers-{name}.json"
    if not file.is_file():
        return result
    earlier = json.loads(file.read_text(encoding="utf-8"))
    for key in ("protocol", "calibration"):
        if earlier[key] != result[key]:
            raise InvalidInput(f"{file.name} has {key} {earlier[key]}, and this run {result[key]}")
    losses = earlier["rows"]["source"]["loss"], result["rows"]["source"]["loss"]
    if abs(losses[0] / losses[1] - 1) > SAME:
        raise InvalidInput(f"{file.name} has a source with loss {losses[0]}, and this run {losses[1]}")
    kept = {key: value for key, value in earlier.items() if key not in ("machine", "date")}
    return {**kept, **result, "rows": {**earlier["rows"], **result["rows"]}}


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option(
    "--run",
    "asked",
    multiple=True,
    help="LABEL ADAPTER DIR [setting=value ...]; of equal labels the best is the row.",
)
@click.option("--sweep", "swept", multiple=True, help="ADAPTER DIR: the peer at its best setting.")
@click.option("--budget", "budgets", multiple=True, default=("50%", "25%", "12.5%"), show_default=True)
@click.option("--update", is_flag=True, help="Keep the other rows of the results.")
@click.option("--python", default=sys.executable, help="Interpreter with the versions that the peers need.")
@click.option("--sequences", default=48, show_default=True, help="Calibration sequences of the source's own.")
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--name", required=True, help="Results go to benchmarks/results/peers-NAME.json.")
def main(
    model: str,
    text: str,
    asked: tuple[str, ...],
    swept: tuple[str, ...],
    budgets: tuple[str, ...],
    update: bool,
    python: str,
    sequences: int,
    length: int,
    window: int,
    max_windows: int | None,
    name: str,
) -> None:
    """Print and save nats lost by peers' own code."""
    directory, runs = resolve(model), [read_run(one) for one in asked]
    sweeps = [read_run(f"sweep {one}") for one in swept]
    geometry = open_source(directory).geometry
    for one in sweeps:
        first_settings(one.adapter, geometry, geometry.cache_elements)  # refuses what has none
    options = Options(window=window, max_windows=max_windows)
    source = load_model(directory)
    bos = source.config.get_text_config().bos_token_id
    calibration_BT = sample_from(
        source, sequences=sequences, length=length, bos=bos, seed=0, batch_size=sequences
    )
    windows = cut(read_text(text), load(directory, options), window, options)
    with tempfile.TemporaryDirectory() as work:
        tokens = Path(work) / "tokens.pt"
        tensors = {"calibration": calibration_BT, "windows": windows.ids_NW, "scored": windows.scored_NT}
        torch.save(tensors, tokens)
        bench = Bench(model=directory, tokens=tokens, scored=int(windows.scored_NT.sum()), python=python)
        base_N, own = bench.source()
        result: dict[str, Any] = {
            "protocol": windows.name,
            "calibration": ["self", sequences, length],
            "rows": {"source": own},
        }
        if update:
            result = updated(name, result)
        for run in runs:
            result["rows"][run.label] = joined(result["rows"].get(run.label), bench.row(run, base_N))
            save(f"peers-{name}", result)  # a stopped run keeps what it has measured
        for one in sweeps:
            for budget in budgets:
                row = sweep(one.adapter, one.repository, geometry, budget, bench, base_N)
                if row is not None:
                    label = f"{one.adapter} {budget}"
                    result["rows"][label] = joined(result["rows"].get(label), row)
                    save(f"peers-{name}", result)
    show_table(
        f"{windows.name}: nats lost by peers' own code",
        ("", "lost", "settings"),
        [
            (label, f"{row['lost']:.4f}", _written(row["settings"]))
            for label, row in result["rows"].items()
            if "lost" in row
        ],
    )
    click.echo(f"saved in {save(f'peers-{name}', result)}")


if __name__ == "__main__":
    main()
