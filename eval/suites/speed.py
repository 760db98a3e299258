"""The suite `speed`: prefill and decoding times of student and teacher in turns.

The times are those of transformers' own forward pass with its live cache on this machine. They compare two
models and say little about a serving engine. One round reads C tokens of B sequences at once (prefill), then
decodes greedily one token of each sequence per step, for a fixed number of steps. Rounds alternate between
student and teacher, so that other load on the machine affects both.

Legend: B sequences, C tokens of context.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.cost_blocks import ModelSpeed, PhaseSpeed, Quartiles, SpeedBlock, SpeedCell
from ...core.console import notice, progress
from ...core.errors import InvalidInput
from ...core.memory import enough_memory, remedy_of
from ...models.causal_lm import Loaded
from ..subject import Subject
from .catalogue import SpeedSettings
from .decoding import greedy, read
from .meter import peak_memory, timed

CONTEXTS = (512, 4096)
_LEAST_ROUNDS = 3  # fewer have no meaningful quartiles
_ROLES = ("student", "teacher")  # the folded parent has the student's shapes


def rows(found: SpeedBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    lines = []
    for cell in found.cells:
        name = f"{cell.batch} x {cell.context} tokens"
        if cell.skipped is not None:
            lines.append([f"speed, {name}", f"skipped: {cell.skipped}"])
            continue
        numbers: dict[str, Callable[[ModelSpeed], object]] = {
            f"prefill, {name}, tokens/s": lambda speed: speed.prefill.tokens_per_second,
            f"decode, {name}, ms/step": lambda speed: speed.decode.milliseconds,
            "  tokens/s": lambda speed: speed.decode.tokens_per_second,
            "  peak MB above weights": lambda speed: f"{speed.peak_bytes / 1e6:,.1f}",
        }
        timings: list[ModelSpeed | None] = [getattr(cell, role, None) for role in roles]
        for label, number in numbers.items():
            lines.append([label, *(str(number(timing)) if timing else "" for timing in timings)])
        if cell.prefill_speedup and cell.decode_speedup:
            lines.append(["  times as fast as the teacher, prefill", str(cell.prefill_speedup)])
            lines.append(["  times as fast as the teacher, decode", str(cell.decode_speedup)])
    return lines


def check_room(subject: Subject) -> None:
    """Check that the prompts fit into every model's positions."""
    _contexts(subject)


def measure(subject: Subject) -> SpeedBlock:
    """Time every cell of the sweep."""
    settings = subject.asked(SpeedSettings)
    tokens = settings.speed_tokens
    cells = [(batch, context) for context in _contexts(subject) for batch in settings.speed_batch]
    roles = [role for role in _ROLES if role in subject.roles]
    groups = [[role] for role in roles] if subject.one_at_a_time else [roles]
    if len(groups) > 1:
        notice(
            "speed: the models do not fit in memory together, so they are timed one after the other "
            "instead of in turns"
        )
    limit = settings.speed_seconds
    end = monotonic() + limit
    found: dict[tuple[int, int], dict[str, Any]] = {cell: {} for cell in cells}
    units = [(group, cell) for group in groups for cell in cells]
    for number, (group, (batch, context)) in enumerate(progress(units, "Speed", len(units))):
        name = f"speed/{'+'.join(group)}/{batch}x{context}"
        seconds = (end - monotonic()) / (len(units) - number)
        found[batch, context] |= subject.part(
            name, partial(_time, subject, group, (batch, context), tokens, seconds)
        )
    paired = len(groups) == 1
    measured = tuple(_cell(*cell, tokens, raw, limit, paired) for cell, raw in found.items())
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if subject.device == "cuda":
        machine = str(torch.cuda.get_device_name())
    return SpeedBlock(machine, paired, measured)


@torch.inference_mode()
def _time(
    subject: Subject, roles: Sequence[str], cell: tuple[int, int], tokens: int, seconds: float
) -> dict[str, Any]:
    """Return the seconds of each round by role, or the reason why there are none."""
    if seconds <= 0:
        return {"skipped": "time"}
    start = monotonic()
    models = {role: subject.load(role) for role in roles}
    vocabulary = min(loaded.vocabulary for loaded in models.values())
    raw: dict[str, dict[str, Any]] = {role: {"prefill": [], "decode": []} for role in roles}
    rounds = subject.asked(SpeedSettings).speed_rounds
    ways = {"a smaller --speed-batch": cell[0] > 1, "a smaller --speed-context": True}
    with enough_memory(remedy_of(ways, "")):
        ids_BC = torch.randint(vocabulary, cell, generator=torch.Generator().manual_seed(0))
        try:
            for role, loaded in models.items():  # this warms up too
                with peak_memory(loaded.device) as peak:
                    _round(loaded, ids_BC, min(tokens, 2))
                raw[role]["peak_bytes"] = peak.bytes
            for number in range(rounds):
                if number >= _LEAST_ROUNDS and monotonic() - start > seconds:
                    break
                for role, loaded in models.items():
                    prefill, decode = _round(loaded, ids_BC, tokens)
                    raw[role]["prefill"].append(prefill)
                    raw[role]["decode"].append(decode)
        except torch.OutOfMemoryError:  # of a GPU
            return {"skipped": "memory"}
    return dict(raw)


def _round(loaded: Loaded, ids_BC: Tensor, tokens: int) -> tuple[float, list[float]]:
    """Return the seconds of the prefill and of each decoding step."""
    device = loaded.device

    def step(ids_BT: Tensor, cache: Any) -> tuple[Tensor, Any]:
        logits_BKV, cache = read(loaded, ids_BT, cache, last=1)
        return greedy(logits_BKV).to(device), cache

    (next_B1, cache), prefill = timed(device, partial(step, ids_BC.to(device), None))
    decode = []
    for _ in range(tokens):
        (next_B1, cache), seconds = timed(device, partial(step, next_B1, cache))
        decode.append(seconds)
    return prefill, decode


def _cell(
    batch: int, context: int, tokens: int, raw: Mapping[str, Any], limit: float, paired: bool
) -> SpeedCell:
    if "skipped" in raw:
        reasons = {"time": f"--speed-seconds {limit:g} were over", "memory": "out of memory"}
        return SpeedCell(batch, context, tokens, 0, skipped=reasons[raw["skipped"]])
    student, teacher = (_timing(raw[role], batch, context) if role in raw else None for role in _ROLES)
    rounds = len(raw["student"]["prefill"])
    prefill = decode = None
    if teacher is not None and paired:

        def middle(role: str, phase: str) -> Any:
            return np.median(np.array(raw[role][phase]).reshape(rounds, -1), 1)

        prefill, decode = (
            quartiles(middle("teacher", phase) / middle("student", phase)) for phase in ("prefill", "decode")
        )
    return SpeedCell(batch, context, tokens, rounds, student, teacher, prefill, decode)


def _timing(raw: Mapping[str, Any], batch: int, context: int) -> ModelSpeed:
    prefill, decode = np.array(raw["prefill"]), np.array(raw["decode"]).ravel()
    return ModelSpeed(_phase(prefill, batch * context), _phase(decode, batch), raw["peak_bytes"])


def quartiles(values: Any) -> Quartiles:
    """Return median and quartiles, by linear interpolation."""
    q1, median, q3 = (float(value) for value in np.percentile(values, [25, 50, 75]))
    return Quartiles(median, q1, q3)


def _phase(seconds: Any, tokens: int) -> PhaseSpeed:
    return PhaseSpeed(quartiles(seconds * 1000), quartiles(tokens / seconds))


def _contexts(subject: Subject) -> Sequence[int]:
    """Return the contexts asked for.

    The default is those of `CONTEXTS` that fit every model, or else the longest that fits all.
    """
    settings = subject.asked(SpeedSettings)
    asked, tokens = settings.speed_context, settings.speed_tokens
    longest, path = subject.limit
    if longest is not None and longest <= tokens:
        raise InvalidInput(
            f"--speed-tokens {tokens}: {path} has {longest} positions; use fewer, e.g. --speed-tokens 4"
        )
    if asked is None:
        fitting = [context for context in CONTEXTS if longest is None or context + tokens <= longest]
        return fitting or [longest - tokens if longest else CONTEXTS[0]]
    if longest is not None and asked[-1] + tokens > longest:
        raise InvalidInput(
            f"--speed-context {asked[-1]} and {tokens} decoded tokens exceed the {longest} positions of "
            f"{path}; use {longest - tokens} or fewer"
        )
    return asked
