"""Runs of lm-evaluation-harness on a model in memory, one task at a time.

This is the only module that uses that library.
"""

import copy
import difflib
import hashlib
import importlib.util
import io
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, TextIO

import numpy as np
import torch

from ...core.console import PLAIN_INTERVAL, notice
from ...core.errors import InvalidInput
from ...models.causal_lm import Loaded

# The tasks that papers on latent attention report, and the metric that they compare by; acc_norm is
# normalised by the bytes of the answer.
PRESETS = {
    "mla-core": (
        "arc_easy",
        "arc_challenge",
        "hellaswag",
        "piqa",
        "winogrande",
        "openbookqa",
        "boolq",
        "mmlu",
    ),
}
PRIMARY = {"arc_challenge": "acc_norm", "hellaswag": "acc_norm", "openbookqa": "acc_norm"}
_SEED = 1234  # the harness's own default, so that the same examples are drawn as when it runs alone


def named(tasks: Sequence[str]) -> tuple[str, ...]:
    """Return tasks, each once, with presets replaced by their tasks."""
    return tuple(dict.fromkeys(task for name in tasks for task in PRESETS.get(name, (name,))))


def check_tasks(names: tuple[str, ...], directory: Path | None) -> None:
    """Check that the harness is installed and knows the tasks.

    Raises:
        InvalidInput: it is not installed, or does not know one.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InvalidInput(
            "--suite tasks needs lm-evaluation-harness, which is not installed; run: "
            "pip install 'kvfold[eval]'"
        )
    if directory is not None and not directory.is_dir():
        raise InvalidInput(
            f"--task-path {directory} is not a directory; name one that holds tasks as YAML files"
        )
    known = _manager(names, directory).all_tasks
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"--tasks {name}: lm-evaluation-harness has no such task; {_hint(name, known, directory)}"
            )


def _hint(name: str, known: Iterable[str], directory: Path | None) -> str:
    """Return what to write in place of an unknown task, the user's own tasks first."""
    own = [] if directory is None else _list(directory, include_defaults=False).all_tasks
    # Own tasks are few, so they are looked for apart: among 14,000 others three may be nearer.
    mine = difflib.get_close_matches(name, own, n=3)
    near = [*mine, *difflib.get_close_matches(name, {*PRESETS, *known} - {*mine}, n=3)][:3]
    if near:
        return f"did you mean {', '.join(near)}?"
    if own:
        more = f" and {len(own) - 5} more" if len(own) > 5 else ""
        return f"--task-path {directory} has {', '.join(own[:5])}{more}; lm-eval ls tasks prints all others"
    if directory is not None:
        return f"--task-path {directory} has no task, that is a YAML file with `task: NAME`"
    return "lm-eval ls tasks prints all; --task-path DIR adds your own"


def run(
    load: Callable[[], Loaded],
    name: str,
    directory: Path | None,
    *,
    batch_size: int,
    limit: int | None,
    fewshot: int | None,
) -> dict[str, Any]:
    """Run a task, or all tasks of a group, on a model.

    Args:
        load: returns the model; it is called once the task and its data are loaded.
        name: the task or group.
        directory: directory of tasks in addition to the harness's own.
        batch_size: requests at once.
        limit: read only this many documents of each task.
        fewshot: examples before each question; None: as many as the task says.

    Returns:
        Plain values: `samples` (documents), `shots`, and `metrics`. Each metric has a
        `value` and, where it is a mean over documents, the `values` and the `documents` they belong to.

    Raises:
        InvalidInput: the task or its data cannot be loaded, or a log likelihood is not a number.
    """
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        tasks = _load(name, directory, fewshot)
        loaded = load()
        # The harness adds a missing padding token to the tokenizer, so it gets a copy.
        tokenizer = copy.deepcopy(loaded.tokenizer)
        model = HFLM(
            pretrained=loaded.model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=loaded.positions,
            trust_remote_code=False,
        )
        random.seed(0)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        found = evaluate(lm=model, task_dict=tasks, limit=limit, bootstrap_iters=0)
    assert found is not None
    return _plain(loaded, name, found)


def version() -> str:
    """Return the version of the harness."""
    import lm_eval

    return str(lm_eval.__version__)


def hash_of(directory: Path | None) -> str:
    """Return the hexadecimal SHA-256 of all files below a directory of tasks."""
    digest = hashlib.sha256()
    if directory is None:
        return digest.hexdigest()
    for file in sorted(directory.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = hashlib.sha256(file.read_bytes()).digest()
            digest.update(f"{file.relative_to(directory)}\n".encode() + content)
    return digest.hexdigest()


def _manager(names: tuple[str, ...], directory: Path | None) -> Any:
    """Return a task manager of the harness.

    It knows the directory's tasks alone if they suffice, since listing the harness's own tasks takes long.
    """
    if directory is not None:
        own = _list(directory, include_defaults=False)
        if not own.all_groups and set(names) <= set(own.all_tasks):
            return own
    return _list(directory, include_defaults=True)


@cache
def _list(directory: Path | None, include_defaults: bool) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InvalidInput(
            f"--suite tasks needs lm-evaluation-harness, which cannot be imported here ({error}); run: "
            "pip install 'kvfold[eval]'"
        ) from None
    with _quiet():
        return TaskManager(
            include_path=None if directory is None else str(directory), include_defaults=include_defaults
        )


def _load(name: str, directory: Path | None, fewshot: int | None) -> Any:
    import datasets
    import yaml

    try:
        tasks = _manager((name,), directory).load([name])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        ImportError,
        AttributeError,
        datasets.exceptions.DatasetsError,
        yaml.YAMLError,
    ) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InvalidInput(
            f"--tasks {name}: it cannot be loaded ({type(error).__name__}): {reason}"
        ) from error
    for task in tasks["tasks"].values():
        default = task.get_config("num_fewshot")
        # A task that says 0 cannot have examples.
        if default is None or (fewshot is not None and default != 0):
            task.set_config(key="num_fewshot", value=fewshot or 0)
        task.set_fewshot_seed(seed=_SEED)
    return tasks


def _plain(loaded: Loaded, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    metrics: dict[str, dict[str, Any]] = {}
    documents = set()
    for task, samples in found["samples"].items():
        for sample in samples:
            _refuse_nan(loaded, task, sample)
            document = f"{task}/{sample['doc_id']}/{sample['doc_hash'][:16]}"
            documents.add(document)
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, bool | int | float | np.number):
                    entry = metrics.setdefault(
                        _named(metric, sample["filter"]), {"values": [], "documents": []}
                    )
                    entry["values"].append(float(value))
                    entry["documents"].append(document)
    for metric, entry in list(metrics.items()):
        if not all(map(math.isfinite, entry["values"])):
            notice(f"{name}: {metric} is not finite in some documents, so it is left out")
            del metrics[metric]
    for entry in metrics.values():
        entry["value"] = math.fsum(entry["values"]) / len(entry["values"])
    # A metric that is not a mean over documents, such as a perplexity, is taken from the harness.
    for key, value in found["results"].get(name, {}).items():
        metric, _, filtered = key.partition(",")
        if filtered and not metric.endswith("_stderr") and isinstance(value, float) and math.isfinite(value):
            metrics.setdefault(_named(metric, filtered), {"value": float(value)})
    return {"samples": len(documents), "shots": max(found["n-shot"].values(), default=0), "metrics": metrics}


def _named(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric}_{filtered}"


def _refuse_nan(loaded: Loaded, task: str, sample: Mapping[str, Any]) -> None:
    for response in sample["filtered_resps"]:
        value = response[0] if isinstance(response, list | tuple) and response else response
        if isinstance(value, float) and math.isnan(value):
            raise InvalidInput(
                f"{loaded.path} gives log likelihoods that are not numbers in document {sample['doc_id']} of "
                f"{task}; --suite ppl names the layer"
            )


class _Lines(io.StringIO):
    """A stream that prints the latest state of a progress bar as a plain line every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._shown = stream, time.monotonic()

    def write(self, text: str) -> int:
        now = time.monotonic()
        if (line := text.strip()) and now - self._shown >= PLAIN_INTERVAL:
            self._shown = now
            print(line, file=self._stream, flush=True)
        return len(text)


@contextmanager
def _quiet() -> Iterator[None]:
    """Redirect the harness's output to stderr: progress bars on a terminal, occasional lines elsewhere."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    errors = sys.stderr
    try:
        with redirect_stdout(errors), nullcontext() if errors.isatty() else redirect_stderr(_Lines(errors)):
            yield
    finally:
        logger.setLevel(level)
