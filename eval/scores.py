"""The scoring pass: every model reads the same windows, and logits exist for one chunk of tokens at a time.

Legend: N windows, B windows of a batch, W ids of a window, T = W - 1 positions that may be scored, S scored
tokens of all windows in order, C tokens of a chunk, D hidden size, V vocabulary.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.console import progress
from ..core.errors import InvalidInput
from ..core.processes import from_every, place, together
from ..core.work import WorkDir
from ..models.causal_lm import Loaded
from ..models.finite import refuse
from ..models.head import check_head, head_logits, last_hidden
from .windows import TextWindows

T = TypeVar("T")
# Logits of a model at once: 128 MiB in float32, and about five times that while two models are compared.
CHUNK = 2**25
_PROBE = 16  # tokens on which logits from the last hidden states are compared with the model's own
# The student as it computes where its cache is stored in a number format otherwise (Options.cache_dtype).
UNQUANTISED = "unquantised"
# The KL(first || second) that are taken, by the end of their measures' names.
_PAIRS = {
    "": ("teacher", "student"),
    "_added": (UNQUANTISED, "student"),
    "_unquantised": ("teacher", UNQUANTISED),
}


class LogitSource(Protocol):
    """A source of logits for windows: a model in memory, or its kept hidden states."""

    path: Path
    vocabulary: int

    def hidden(self, first: int, ids_BW: Tensor) -> Tensor:
        """Return the last hidden states (B, T, D) of B windows from number `first`."""

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return logits (C, V)."""

    def refusal(self, role: str, ids_1W: Tensor, window: int) -> InvalidInput:
        """Return the error to raise where logits are not finite."""


class Live:
    """A model in memory.

    Args:
        loaded: the model.
        windows: the windows that it reads.
        around: returns a context in which the model runs.
    """

    def __init__(
        self,
        loaded: Loaded,
        windows: TextWindows,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Check on a few tokens that the model's logits are its head applied to its last hidden states.

        Raises:
            InvalidInput: they differ.
        """
        self._around = around
        with around():
            check_head(loaded, windows.ids_NW[:1, :_PROBE])
        self.loaded, self.path, self.vocabulary = loaded, loaded.path, loaded.vocabulary

    def hidden(self, first: int, ids_BW: Tensor) -> Tensor:
        """Return the last hidden states (B, T, D); the last id of a window is only predicted."""
        with self._around():
            return last_hidden(self.loaded, ids_BW[:, :-1])

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return logits (C, V) in the model's dtype."""
        return head_logits(self.loaded.model, hidden_CD)

    def refusal(self, role: str, ids_1W: Tensor, window: int) -> InvalidInput:
        """Return an error that names the first module with values that are not finite."""
        with self._around():
            return refuse(role, self.loaded, ids_1W[:, :-1], window)


@dataclass(frozen=True)
class Scores:
    """The scores of every scored token of every window in order, float64 on the CPU.

    Attributes:
        window_S: number of each token's window, int64.
        position_S: number of ids before each token in its window, int64.
        nll: negative log likelihood (S,) in nats, by role of the model.
        kl_S: KL(teacher || student) in nats; None without a teacher.
        same_S: 1 where student and teacher find the same token most probable, else 0; None without a teacher.
        others: the same measures (S,) of other pairs: `kl_added` and `same_added` of the student without and
            with its cache in a number format, `kl_unquantised` and `same_unquantised` of the teacher and the
            student without it.
    """

    window_S: Tensor
    position_S: Tensor
    nll: dict[str, Tensor]
    kl_S: Tensor | None
    same_S: Tensor | None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def counts(self) -> list[float]:
        """The number of scored tokens in each window."""
        return torch.bincount(self.window_S).double().tolist()

    def by_window(self, value_S: Tensor) -> list[float]:
        """Return the mean of a value over each window's tokens."""
        return (torch.bincount(self.window_S, value_S) / torch.bincount(self.window_S)).tolist()


def gather(windows: TextWindows, measures: Mapping[str, Tensor]) -> Scores:
    """Return the scores from measures (S,)."""
    window_S, target_S = windows.scored_NT.nonzero(as_tuple=True)
    found = {name: value.double() for name, value in measures.items()}
    kl_S, same_S = found.pop("kl", None), found.pop("same", None)
    paired = [f"{kind}{end}" for end in _PAIRS for kind in ("kl", "same")]
    others = {name: found.pop(name) for name in paired if name in found}
    return Scores(window_S, target_S + 1, found, kl_S, same_S, others)


def pending(windows: TextWindows, batch_size: int, roles: Sequence[str], journal: WorkDir) -> list[int]:
    """Return the first windows of this process's share of the batches that the journal does not hold."""
    starts = [
        start
        for start in range(0, len(windows.ids_NW), batch_size)
        if _part(roles, start) not in journal.units
    ]
    rank, ranks = place()
    return starts[rank::ranks]


@torch.inference_mode()
def score(
    sources: Mapping[str, LogitSource],
    windows: TextWindows,
    batch_size: int,
    *,
    roles: Sequence[str] | None = None,
    chunk: int | None = None,
    journal: WorkDir | None = None,
) -> dict[str, Tensor]:
    """Score the windows with all models at once.

    Several processes share the batches, and each returns the numbers of all.

    Args:
        sources: by role: `student`, and `teacher`, `parent` and `UNQUANTISED` where they are measured.
        windows: the windows that they read.
        batch_size: B.
        roles: the roles to return; None: those of the sources. A role needs no source where nothing is left
            to score.
        chunk: C; None: as many tokens as make `CHUNK` logits.
        journal: the record of finished batches.

    Returns:
        Measures (S,) in float32: one NLL per role, `kl` and `same` where there are student and teacher, and
        the same of the other pairs of roles; see `Scores.others`.

    Raises:
        InvalidInput: a model gives a logit that is not finite.
    """
    kept, roles = journal or WorkDir(), roles or list(sources)
    own = pending(windows, batch_size, roles, kept)
    rounds = max(from_every(len(own)), default=0)
    for turn in progress(range(rounds), "Scoring", total=rounds):
        found: dict[str, dict[str, str]] = {}
        with together():
            if turn < len(own):
                part = slice(own[turn], own[turn] + batch_size)
                scored = _score_batch(
                    sources, windows.ids_NW[part], windows.scored_NT[part], chunk, own[turn]
                )
                found[_part(roles, own[turn])] = {name: _pack(value) for name, value in scored.items()}
        for parts in from_every(found):
            for name, value in parts.items():
                kept.add({name: value})
    batches = [kept.units[_part(roles, start)] for start in range(0, len(windows.ids_NW), batch_size)]
    return {name: torch.cat([_unpack(batch[name]) for batch in batches]) for name in batches[0]}


def _score_batch(
    sources: Mapping[str, LogitSource], ids_BW: Tensor, scored_BT: Tensor, chunk: int | None, first: int
) -> dict[str, Tensor]:
    """Return the measures (S,) of one batch's scored tokens; its first window is number `first`."""
    window_S, target_S = scored_BT.nonzero(as_tuple=True)
    wanted_S = ids_BW[window_S, target_S + 1]
    hidden = {}
    for role, source in sources.items():
        hidden_BTD = source.hidden(first, ids_BW)
        hidden[role] = hidden_BTD[scored_BT.to(hidden_BTD.device)]
    tokens = chunk or max(1, CHUNK // max(source.vocabulary for source in sources.values()))
    chunks: dict[str, list[Tensor]] = {}
    for start in range(0, len(wanted_S), tokens):
        part = slice(start, start + tokens)
        compared = {}
        for role, source in sources.items():
            logits_CV = source.logits(hidden[role][part]).float()
            broken = (~logits_CV.isfinite().all(-1)).nonzero()
            if len(broken):
                row = int(window_S[start + int(broken[0])])
                raise source.refusal(role, ids_BW[row : row + 1], first + row)
            logp_CV = logits_CV.log_softmax(-1)
            del logits_CV
            chunks.setdefault(role, []).append(
                -logp_CV.gather(1, wanted_S[part, None].to(logp_CV.device))[:, 0]
            )
            if any(role in pair and sources.keys() >= set(pair) for pair in _PAIRS.values()):
                compared[role] = logp_CV
        for end, (known, other) in _PAIRS.items():
            if compared.keys() >= {known, other}:
                teacher_CV = compared[known].to(compared[other].device)
                student_CV = compared[other]
                teacher_CV, student_CV = common_vocabulary(teacher_CV, student_CV)
                chunks.setdefault(f"kl{end}", []).append(token_kl(teacher_CV, student_CV))
                chunks.setdefault(f"same{end}", []).append(teacher_CV.argmax(-1) == student_CV.argmax(-1))
    return {measure: torch.cat(parts).float().cpu() for measure, parts in chunks.items()}


def common_vocabulary(ours_CV: Tensor, theirs_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sets of log probabilities over the entries that both have, each normalised over them.

    The other entries are padding of the vocabulary, which no token of the text uses.
    """
    width = min(ours_CV.shape[-1], theirs_CV.shape[-1])
    ours, theirs = (
        logp if logp.shape[-1] == width else logp[:, :width].log_softmax(-1) for logp in (ours_CV, theirs_CV)
    )
    return ours, theirs


def token_kl(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """Return KL(teacher || student) of each token (C,), nats, from log probabilities."""
    return (teacher_CV.exp() * (teacher_CV - student_CV)).sum(-1)


def _part(roles: Sequence[str], start: int) -> str:
    return f"scores/{'+'.join(roles)}/{start}"


def _pack(value_S: Tensor) -> str:
    """Return little-endian float32 as base64 text; JSON numbers would take three times the space."""
    return base64.b64encode(value_S.numpy().astype("<f4").tobytes()).decode("ascii")


def _unpack(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32))
