"""Peers' own repositories on the tokens and windows of benchmarks.fidelity: `python -m benchmarks.peers MODEL
--text FILE --run "LABEL ADAPTER DIR [setting=value ...]"`.

Nothing of a peer is copied: a run names a clone that the user has, and is a process of its own, with an
interpreter that has the versions the peer needs (`--python`). Adapters are in peer_process.py: `transmla` and
`care` call the converters of fxmeng/TransMLA and FutureMLS-Lab/CARE, `mha2mla` that of JT-Ushio/MHA2MLA.
Peers whose code needs a GPU or a training script, X-EcoMLA and mha2gqa, are run by their own commands; the
adapter `directory` scores the model that these wrote. Results hold commits and versions.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from kvfold.convert.calibration.self_text import sample_from
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.windows import cut
from kvfold.models.causal_lm import load, load_model
from kvfold.texts.corpus import read_text

from .machine import save
from .peer_process import ADAPTERS


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
    """Return the run that `LABEL ADAPTER DIR [setting=value ...]` names.

    Raises:
        InvalidInput: a part is missing, or there is no such adapter or directory.
    """
    label, adapter, place, *pairs = [*text.split(), "", ""][: max(3, len(text.split()))]
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


def compare(
    runs: Sequence[PeerRun], model: Path, tokens: Path, scored: int, python: str
) -> dict[str, dict[str, Any]]:
    """Return the rows of peers: nats lost per token against the source in the same windows.

    Args:
        runs: of peers.
        model: the source.
        tokens: the file of tokens, as peer_process.py describes it.
        scored: the number of scored tokens.
        python: the interpreter.
    """
    source = PeerRun(label="source", adapter="source", repository=model, settings={})
    own = score(source, model, tokens, python)
    base_N = torch.tensor(own["nll"], dtype=torch.float64)
    rows = {"source": {"loss": float(base_N.sum()) / scored, "versions": own["versions"]}}
    for run in runs:
        found = score(run, model, tokens, python)
        lost_N = torch.tensor(found["nll"], dtype=torch.float64) - base_N
        rows[run.label] = {
            "lost": float(lost_N.sum()) / scored,
            "standard_error": float(lost_N.std()) * len(lost_N) ** 0.5 / scored,
            "adapter": run.adapter,
            "settings": dict(run.settings),
            "commit": commit_of(run.repository),
            "versions": found["versions"],
        }
        click.echo(f"{run.label}: {rows[run.label]['lost']:.4f}", err=True)
    return rows


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--run", "asked", multiple=True, required=True, help="LABEL ADAPTER DIR [setting=value ...].")
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
    python: str,
    sequences: int,
    length: int,
    window: int,
    max_windows: int | None,
    name: str,
) -> None:
    """Print and save nats lost by peers' own code."""
    directory, runs = resolve(model), [read_run(one) for one in asked]
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
        rows = compare(runs, directory, tokens, int(windows.scored_NT.sum()), python)
    show_table(
        f"{windows.name}: nats lost by peers' own code",
        ("", "lost"),
        [(label, f"{row['lost']:.4f}") for label, row in rows.items() if "lost" in row],
    )
    result = {"protocol": windows.name, "calibration": ["self", sequences, length], "rows": rows}
    click.echo(f"saved in {save(f'peers-{name}', result)}")


if __name__ == "__main__":
    main()
