"""Results of the Python API, which show themselves in a terminal and in a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .arguments import public
from .core.errors import InvalidInput
from .core.grid import Grid, Tabular
from .core.units import show_bytes, show_kinds
from .core.untrusted import shorten

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from .convert.request import FoldRequest
    from .engines.verify import VerificationReport

_LOADED_DTYPES = ("auto", "float32", "bfloat16", "float16")  # of `Folded.load`


@dataclass(frozen=True, kw_only=True, repr=False)
class Folded(Tabular):
    """A folded checkpoint.

    Attributes:
        directory: the output.
        record: what is in its kvfold.json.
        request: what was asked for, with the choices that were made.
        notices: sentences that the user should know.
        verification: what the rules and the run at the end found; None where none was asked for.
    """

    directory: Path
    record: dict[str, Any]
    request: FoldRequest
    notices: tuple[str, ...]
    verification: VerificationReport | None

    @property
    def cache(self) -> dict[str, Any]:
        """Cache `before` and `after` (elements per token and layer, bytes per token), and their `ratio`."""
        return dict(self.record["cache"])

    @property
    def predicted_loss(self) -> float | None:
        """Predicted loss in nats per token; None where weights alone decided."""
        loss = self.record["predicted_loss"]
        return None if loss is None else float(loss)

    @property
    def measured_kl(self) -> float | None:
        """KL from the source in nats per token, on calibration text held back from the fit.

        None where there was no such text, or both models did not fit into memory.
        """
        measured = self.record.get("measured_kl")
        return None if measured is None else float(measured["kl"])

    @public
    def load(self, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto") -> Any:
        """Return the checkpoint as a transformers model in eval mode.

        It needs no remote code: kvfold's own classes load what kvfold wrote.

        Args:
            dtype: `float32`, `bfloat16` or `float16`, or torch's; `auto` is the checkpoint's own.
            device: `cpu` or `cuda`, or torch's; `auto` is cuda where there is one.

        Raises:
            InvalidInput: it cannot be loaded whole, or there is no such device.
        """
        import torch

        from .models.causal_lm import load
        from .models.load_options import DEVICES, LoadOptions

        kind, place = str(dtype).removeprefix("torch."), str(device)
        if kind not in _LOADED_DTYPES:
            raise InvalidInput(f"dtype is {shorten(dtype)}; it should be one of {', '.join(_LOADED_DTYPES)}")
        if not re.fullmatch(rf"{'|'.join(DEVICES)}|cuda:[0-9]+", place):
            raise InvalidInput(
                f"device is {shorten(device)}; it should be one of {', '.join(DEVICES)}, or cuda:N"
            )
        count, number = torch.cuda.device_count(), place.partition(":")[2]
        if number and int(number) >= count > 0:
            raise InvalidInput(f"device is {shorten(device)}; torch finds cuda:0 to cuda:{count - 1} here")
        kind = str(self.record["dtype"]) if kind == "auto" else kind
        return load(self.directory, LoadOptions(dtype=kind, device=place), multimodal=True).model

    def grid(self) -> Grid:
        """Return the fold in a few lines."""
        record, cache = self.record, self.record["cache"]
        before, after = (cache[side]["elements_per_token_per_layer"] for side in ("before", "after"))
        size = show_bytes(cache["after"]["bytes_per_token"])
        sizes = ", ".join(f"{key} {value}" for key, value in record["target"].items() if key != "name")
        kinds = cache.get("layers")
        rows = [
            ("source", str(record["source"]["name"])),
            ("target", f"{record['target']['name'].upper()} ({sizes}) by {record['method']}"),
            ("container", f"{record['container']}, {record['dtype']}"),
            (
                "cache",
                f"{before} -> {after} elements per token and layer ({cache['ratio']:.1%}), {size} per token",
            ),
        ]
        if kinds:
            rows.append(("layers", f"{show_kinds(kinds)}; the cache is that of layers that attend"))
        if self.predicted_loss is not None:
            rows.append(("predicted loss", f"{self.predicted_loss:.4f} nats per token"))
        if self.measured_kl is not None:
            rows.append(("KL, held-back calibration text", f"{self.measured_kl:.4f} nats per token"))
        rows += [("note", text) for text in self.notices]
        return Grid(str(self.directory), ("", ""), rows)


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingRun(Tabular):
    """A finished distillation.

    Attributes:
        directory: the distilled checkpoint.
        report: `student`, `teacher`, `steps`, `tokens`, each stage's losses, and `evaluation` where the
            recipe has held-out text.
        notices: sentences that the user should know.
    """

    directory: Path
    report: dict[str, Any]
    notices: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return int(self.report["steps"])

    @property
    def tokens(self) -> int:
        """Tokens that were trained on."""
        return int(self.report["tokens"])

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Name and losses of every stage, at its `first` step and over its `last` tenth; None: unknown."""
        return list(self.report["stages"])

    def grid(self) -> Grid:
        """Return every loss of every stage at both ends."""
        from .distill.display import LOSS_COLUMNS, loss_rows

        title = f"{self.steps} steps, {self.tokens:,} tokens"
        return Grid(title, LOSS_COLUMNS, loss_rows(self.stages))


class NoSuchNumber(InvalidInput, KeyError):
    """An error in the path of a number: a report has no number there."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would put the sentence in quotes


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurements(Tabular, Mapping[str, "float | None"]):
    """An evaluation, and a mapping of its numbers.

    Its keys are the short names of `kvfold eval --assert` (`kl.mean`, `ppl`, `cache.ratio`) whose suite was
    run, so that `dict(found)` has the numbers that matter most. `found[path]`, `found.get(path)` and
    `path in found` also take any longer path of the report, such as `ppl.student.perplexity`.

    Attributes:
        report: everything that was measured, as plain values; what `kvfold eval --json` prints.
        table: the same as a table.
        notices: sentences that the user should know.
    """

    report: dict[str, Any]
    table: Grid
    notices: tuple[str, ...]

    def __getitem__(self, path: str) -> float | None:
        """Return a number by its path, as in `kvfold eval --assert`; None where it is undefined.

        Args:
            path: a short name such as `kl.mean`, or any path of the report, such as
                `ppl.student.perplexity`.

        Raises:
            NoSuchNumber: the path leads nowhere, or not to a number; a KeyError and an InvalidInput.
        """
        from .eval.assertions import look_up

        if not isinstance(path, str):
            raise NoSuchNumber(f"{path!r} is not the path of a number; give a text such as 'kl.mean'")
        try:
            return look_up(path, self.report)
        except InvalidInput as mistake:
            raise NoSuchNumber(str(mistake)) from None

    def __iter__(self) -> Iterator[str]:
        from .eval.assertions import ALIASES

        return (name for name in ALIASES if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True  # also where no suite with a short name was run

    def grid(self) -> Grid:
        """Return the numbers that matter most, a column for each model."""
        return self.table


@dataclass(frozen=True, kw_only=True, repr=False)
class Quantized(Tabular):
    """A checkpoint with rounded weights.

    Attributes:
        directory: the output.
        record: what is in its kvfold.json.
    """

    directory: Path
    record: dict[str, Any]

    def grid(self) -> Grid:
        """Return what was rounded, what was left and the bytes, in a few lines."""
        return quantized_grid(str(self.directory), self.record["quantize"])


def quantized_grid(title: str, found: dict[str, Any]) -> Grid:
    """Return the plan or the result of a quantisation as a table.

    `found` is `QuantizePlan.to_dict()`, which the record holds too.
    """
    group = "" if found["group_size"] is None else f", groups of {found['group_size']}"
    before, after = found["bytes_before"], found["bytes_after"]
    rows = [
        ("scheme", f"{found['scheme']}{group} ({found['format']})"),
        ("weights", f"{found['rounded_weights']} rounded, {found['rounded_share']:.1%} of all numbers"),
        ("size", f"{show_bytes(before)} -> {show_bytes(after)} ({after / before:.1%})"),
    ]
    rows += [
        ("left", f"{len(modules)} modules such as {modules[0]}: {reason}")
        for reason, modules in found["left"].items()
    ]
    return Grid(title, ("", ""), rows)


@dataclass(frozen=True, kw_only=True, repr=False)
class Published(Tabular):
    """A checkpoint on the Hub, or one that would go there.

    Attributes:
        repository: `owner/name`.
        card: text of the model card.
        files: the size of every file, in bytes, by its name.
        commit: the commit's hash; None after a dry run.
        removed: files that the commit removed from the repository.
        notices: sentences that the user should know.
        left_out: the entries of the directory that are not part of a checkpoint, with a reason.
        verification: what `verify` found.
    """

    repository: str
    card: str
    files: dict[str, int]
    commit: str | None
    removed: tuple[str, ...]
    notices: tuple[str, ...]
    left_out: dict[str, str]
    verification: VerificationReport

    def grid(self) -> Grid:
        """Return the files and their sizes."""
        state = "nothing was sent" if self.commit is None else f"commit {self.commit}"
        rows = [(name, f"{size:,}") for name, size in self.files.items()]
        return Grid(f"{self.repository} ({state})", ("file", "bytes"), rows)
