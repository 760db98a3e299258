"""Runs of a checkpoint in a process that cannot import kvfold, and engines' answers held against them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..core.errors import InvalidInput
from ..core.memory import lack_of

HOURS = 4.0  # that a run may take: a large model on a slow disk takes one to load
NEAR = 1e-3  # by which log-probabilities in another engine may differ, float32
PROBES = {
    "vllm": "probe_vllm.py",
    "vllm+kvfold": "probe_vllm.py",
    "sglang": "probe_sglang.py",
    "mlx": "probe_mlx.py",
}
# The modules by which engines are found.
MODULES = {"vllm": "vllm", "vllm+kvfold": "vllm", "sglang": "sglang", "mlx": "mlx_lm"}
_RAISED = re.compile(r"[A-Za-z_.]*(Error|Exception)(:|$)")  # the last line of a traceback
_PLAIN = {"latent": False, "trust": False}  # what a source is
ROUNDED = 0.05  # by which they may on average in 16 bits, where wrong ones are nats apart


@dataclass(frozen=True)
class Check:
    """A result of `verify`: the name of what was measured, whether it passed, and the result in words.

    `passed` is None where there is nothing to hold it against.
    """

    name: str
    passed: bool | None
    detail: str


class NotRun(InvalidInput):
    """A lack of memory for the run of a checkpoint, which is no fault of the checkpoint.

    Args:
        reason: which memory is too small, for what.
        rules_only: the option of a command that leaves the run out.
    """

    def __init__(self, reason: str, rules_only: str = "--lint") -> None:
        super().__init__(
            f"{reason}; end other programs that take memory, or use {rules_only} to apply the rules alone"
        )
        self.reason = reason


def reason_of(mistake: InvalidInput) -> str:
    """Return why a checkpoint was not run, without the option of a command."""
    return mistake.reason if isinstance(mistake, NotRun) else str(mistake)


def run_apart(script: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a probe (probe.py, probe_vllm.py, ...) in a fresh process, with an empty cache of modules.

    Returns:
        Its answer; `{"failed": why}` where it has none, or none within HOURS.

    Raises:
        NotRun: memory is full, or the system killed the run, which it does for lack of memory.
    """
    with tempfile.TemporaryDirectory() as place:
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(Path(__file__).parent / "probes" / script)],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                cwd=place,
                check=False,
                env={**os.environ, "HF_MODULES_CACHE": place, "HF_HUB_OFFLINE": "1"},
                timeout=HOURS * 3600,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"the run was stopped, since it had not ended after {HOURS:g} hours"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        if done.returncode == -signal.SIGKILL:
            # SGLang kills itself after its scheduler, another process, has raised and told so.
            lines = [line for line in lines if _RAISED.match(line)]
            if not lines or "sigquit" not in done.stderr.lower():
                raise NotRun("the run was killed, usually by the system for lack of memory")
        lack = lack_of("\n".join(lines))
        if lack is not None:
            raise NotRun(f"{lack} to run the checkpoint")
        return {
            "failed": f"the run ended with {lines[-1][:300] if lines else f'exit code {done.returncode}'}"
        }
    return dict(json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True)
class Packed:
    """The places of quantised weights that transformers runs dequantised.

    Attributes:
        directory: the checkpoint.
        source: what it was made from; None where that is unknown, or not quantised.
    """

    directory: Path
    source: Path | None

    @classmethod
    def of(cls, directory: Path, source: Path | None) -> Self | None:
        """Return where the quantised weights of a checkpoint and its source are; None if it has none."""
        from ..checkpoints.quantised.packed_checkpoint import is_quantised

        if not is_quantised(directory):
            return None
        return cls(directory, source.resolve() if source is not None and is_quantised(source) else None)


def serve(
    engine: str,
    asked: dict[str, Any],
    answers: dict[str, Any],
    claimed: float | None,
    packed: Packed | None = None,
) -> tuple[list[Check], dict[str, Any]]:
    """Run a checkpoint in an engine.

    vLLM runs quantised weights as they are, in the dtype that it chooses for them. Where it runs those of the
    source no more than those of the checkpoint, it has no kernels for them here, and runs the dequantised
    copy.

    Args:
        engine: of PROBES.
        asked: of its probe: `directory`, `dtype`, `trust`, `latent`, `multimodal`.
        answers: of probe.py, on the same checkpoint.
        claimed: elements per token and layer that the record says are cached.
        packed: where the quantised weights are, of which `asked` names a dequantised copy; None: they are
            not quantised.

    Returns:
        The checks, and their numbers: version, dtype, differences of log-probabilities in nats, equal tokens,
        elements cached.
    """
    given = {**asked, **{name: answers[name] for name in ("text", "prompt", "steps")}}
    given["plugin"] = engine == "vllm+kvfold"
    found: list[Check] = []
    if packed is not None and MODULES[engine] == "vllm":
        quantised = {**given, "dtype": "auto", "directory": str(packed.directory)}
        served = run_apart(PROBES[engine], quantised)
        if "failed" not in served:
            return compare_served(served, answers, claimed, engine)
        if packed.source is not None:
            its = run_apart(PROBES[engine], {**quantised, "directory": str(packed.source), **_PLAIN})
            if "failed" not in its:
                told = f"it runs the quantised source, but not this: {served['failed']}"
                return [Check(engine, False, told)], {}
        found = [
            Check(f"{engine} quantised", None, f"dequantised for it, since as they are {served['failed']}")
        ]
    checks, numbers = compare_served(run_apart(PROBES[engine], given), answers, claimed, engine)
    return found + checks, numbers


def compare_served(
    served: dict[str, Any], answers: dict[str, Any], claimed: float | None, engine: str = "vllm"
) -> tuple[list[Check], dict[str, Any]]:
    """Compare what an engine's probe measured with what probe.py measured.

    Arguments and result are those of `serve`.
    """
    if "failed" in served:
        return [Check(engine, False, served["failed"])], {}
    if "lacking" in served:
        return [Check(engine, None, f"{served['version']} was not run: {served['lacking']}")], {}
    size = sum(served["cache"]) / len(served["cache"])
    numbers: dict[str, Any] = {name: served[name] for name in ("version", "dtype")} | {"cache": size}
    for name in ("own", "source"):
        if name in answers:
            numbers[name] = _differences(served, answers[name])
    return [*_held(numbers, served, answers["own"], engine), check_cache(size, claimed, engine)], numbers


def _differences(served: dict[str, Any], answers: dict[str, Any]) -> dict[str, float]:
    """Return how far an engine's answers are from those of transformers, for the checkpoint or its source."""
    gaps = [abs(a - b) for a, b in _pairs(served["log_probs"], answers["log_probs"])]
    tokens = _pairs(served["tokens"], answers["tokens"])
    return {
        "max_difference": max(gaps),
        "mean_difference": sum(gaps) / len(gaps),
        "same_tokens": sum(a == b for a, b in tokens),
        "tokens": len(tokens),
    }


def _pairs(ours: list[list[float]], theirs: list[list[float]]) -> list[tuple[float, float]]:
    return [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]


def _held(numbers: dict[str, Any], served: dict[str, Any], own: dict[str, Any], engine: str) -> list[Check]:
    """Compare an engine's log-probabilities and greedy tokens with transformers'."""
    found = numbers["own"]
    most, mean = found["max_difference"], found["mean_difference"]
    how = f", by {served['by']}," if "by" in served else ""
    words = (
        f"{served['version']}{how} in {served['dtype']} gives the text log-probabilities at most "
        f"{most:.1e} from transformers'"
    )
    tokens = f"{found['same_tokens']} of {found['tokens']} greedy tokens are transformers'"
    if served["dtype"] != "float32":
        # Rounding chooses between equally probable tokens, and all that follow differ then: reported, not
        # judged.
        return [
            Check(engine, mean <= ROUNDED, f"{words}, {mean:.1e} on average"),
            Check(f"{engine} greedy", None, tokens),
        ]
    rows = zip(served["tokens"], own["tokens"], own["leads"], strict=True)
    # The lead of the best token where two sequences part; 0 where they do not.
    leads = [next((lead for a, b, lead in zip(*row, strict=True) if a != b), 0.0) for row in rows]
    told = "" if max(leads) == 0 else f", where they part the best one leads by {max(leads):.1e}"
    near = most <= NEAR and mean <= NEAR  # the mean shows NaN, which a maximum may ignore
    return [Check(engine, near, words), Check(f"{engine} greedy", max(leads) <= 2 * NEAR, tokens + told)]


def check_cache(size: float, claimed: float | None, engine: str) -> Check:
    """Compare what an engine caches with the record.

    What it caches in full it computes correctly, so a lost saving does not fail.
    """
    words = f"{size:g} elements per token and layer" + (f", kvfold.json claims {claimed}" if claimed else "")
    return Check(f"{engine} cache", True if size == claimed else None, words)
