"""The suite `retrieval`: models are asked for a key that is hidden somewhere in a long text.

Prompts are generated (haystack.py) and equal for all models. There are two scores. `accuracy` counts the
prompts whose digits are generated exactly by greedy decoding. `choice` counts the prompts at which, of ten
candidates, the text raises the likelihood of the right key most; it also distinguishes models that are too
small to generate the key. The gain is log p(key | text, question) - log p(key | question), which cancels the
prior likelihood of the digits (Holtzman et al. 2021, arXiv 2104.08315).

Legend: B prompts of a batch, P tokens of a prompt, T tokens of a key, C candidates, K positions with logits,
V vocabulary.
"""

import copy
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.quality_blocks import (
    Grid,
    NeedleDifference,
    NeedleMap,
    NeedleMeans,
    RetrievalBlock,
)
from ...core.console import progress
from ...models.causal_lm import Loaded
from ..estimate import Array, estimate, proportion, proportion_difference
from ..scores import UNQUANTISED
from ..subject import Subject
from .catalogue import RetrievalSettings
from .decoding import greedy, read, read_prompts
from .haystack import CANDIDATES, KINDS, STEPS, Haystack, NeedlePrompt, prose

LONGEST = 4096


def rows(found: RetrievalBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    lines = []
    for kind in KINDS:
        maps: list[NeedleMap] = [getattr(found, role)[kind] for role in roles]
        lines.append([f"{kind}, generated right", *(str(one.overall.accuracy) for one in maps)])
        lines.append([f"  likeliest of {found.candidates}", *(str(one.overall.choice) for one in maps)])
        for number, length in enumerate(maps[0].lengths):
            shares = (sum(one.choice[number]) / len(one.depths) for one in maps)
            lines.append([f"  the same at {length} tokens", *(f"{share:.3f}" for share in shares)])
        for other, of_kind in (("teacher's", found.difference), ("without --cache-dtype", found.added)):
            if of_kind:
                lines.append([f"  generated right, - {other}", str(of_kind[kind].accuracy)])
                lines.append([f"  likeliest, - {other}", str(of_kind[kind].choice)])
    return lines


def check_room(subject: Subject) -> None:
    """Check that the prompts fit into every model's positions."""
    subject.once(_prompts)


def measure(subject: Subject) -> RetrievalBlock:
    """Ask every model for the keys of the same prompts."""
    prompts, depths = subject.once(_prompts), _depths(subject.asked(RetrievalSettings).retrieval_depths)
    roles = subject.roles if subject.options.cache_dtype is None else (*subject.roles, UNQUANTISED)
    units = [(role, *unit) for role in roles for unit in prompts]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {role: {kind: [] for kind in KINDS} for role in roles}
    for role, kind, length in progress(units, "Retrieval", len(units)):
        ask = partial(_ask, subject, role, prompts[kind, length])
        found[role][kind].append(subject.part(f"retrieval/{role}/{kind}/{length}", ask))
    lengths = tuple(length for kind, length in prompts if kind == KINDS[0])
    maps = {
        role: {kind: _map(lengths, depths, kinds[kind]) for kind in KINDS} for role, kinds in found.items()
    }
    return RetrievalBlock(
        candidates=CANDIDATES,
        chance=1 / CANDIDATES,
        seed=subject.asked(RetrievalSettings).retrieval_seed,
        filler_sha256=hashlib.sha256("\n".join(prose()).encode()).hexdigest(),
        student=maps["student"],
        teacher=maps.get("teacher"),
        parent=maps.get("parent"),
        difference=_differences(found, "teacher"),
        unquantised=maps.get(UNQUANTISED),
        added=_differences(found, UNQUANTISED),
    )


def _prompts(subject: Subject) -> dict[tuple[str, int], list[NeedlePrompt]]:
    settings, student = subject.asked(RetrievalSettings), subject.described("student")
    seed, samples = settings.retrieval_seed, settings.retrieval_samples
    haystack = Haystack(student.path, student.tokenizer, settings.retrieval_keys)
    depths = _depths(settings.retrieval_depths)
    return {
        (kind, length): [
            haystack.sample(kind, length, depth, f"{seed}/{n}") for depth in depths for n in range(samples)
        ]
        for kind in KINDS
        for length in _lengths(subject, haystack)
    }


def _ask(subject: Subject, role: str, prompts: Sequence[NeedlePrompt]) -> dict[str, Any]:
    """Return for each prompt 1 or 0 for right digits, and the rank of the right key."""
    running = subject.unquantised() if role == UNQUANTISED else nullcontext(subject.load(role))
    size = subject.options.batch_size
    exact: list[int] = []
    ranks: list[float] = []
    with running as loaded:
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            answers, score_BC = answer(loaded, batch, role)
            exact += [int(digits == sample.key) for digits, sample in zip(answers, batch, strict=True)]
            ranks += rank(score_BC).tolist()
    return {"exact": exact, "rank": ranks}


@torch.inference_mode()
def answer(loaded: Loaded, batch: Sequence[NeedlePrompt], role: str = "model") -> tuple[list[str], Tensor]:
    """Return a model's answers to B prompts of one length, read at once without padding.

    Returns:
        The first digits that it generates greedily after each prompt, and the gain (B, C) in the log
        likelihood of each candidate by the text, nats, float64.

    Raises:
        InvalidInput: the logits are not finite.
    """
    device = loaded.device
    ids_BP = torch.tensor([sample.ids for sample in batch], device=device)
    logits_BKV, cache = read_prompts(loaded, ids_BP, role)
    columns = zip(*(sample.candidates for sample in batch), strict=True)
    # Each candidate in turn reads a copy of the cache, so that at most two caches are in memory.
    score_BC = torch.stack([_score(loaded, cache, logits_BKV, column) for column in columns], 1)
    score_BC -= torch.stack([_without_text(loaded, sample) for sample in batch])
    generated = []
    for _ in range(STEPS):
        generated.append(greedy(logits_BKV))
        logits_BKV, cache = read(loaded, generated[-1].to(device), cache, last=1)
    texts = loaded.tokenizer.batch_decode(torch.cat(generated, 1))
    return [match[0] if (match := re.search(r"\d+", text)) else "" for text in texts], score_BC


def _without_text(loaded: Loaded, sample: NeedlePrompt) -> Tensor:
    """Return the log likelihood (C,) of each candidate after the question alone, float64."""
    count = len(sample.candidates[0])
    ids_CP = torch.tensor(
        [[*sample.question, *candidate] for candidate in sample.candidates], device=loaded.device
    )
    logits_CKV = read(loaded, ids_CP[:, :-1], last=count)[0].double()
    keys_CT = ids_CP[:, -count:].to(logits_CKV.device)
    return logits_CKV.log_softmax(-1).gather(-1, keys_CT[..., None])[..., 0].sum(1).cpu()


def rank(score_BC: Tensor) -> Tensor:
    """Return the rank (B,) of each row's first entry, 1 for the greatest; a tie counts one half."""
    right_B1, others_BC = score_BC[:, :1], score_BC[:, 1:]
    return 1 + (others_BC > right_B1).sum(1) + 0.5 * (others_BC == right_B1).sum(1)


def _score(loaded: Loaded, cache: Any, last_BKV: Tensor, keys: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the log likelihood (B,) of a key after each prompt, float64.

    The keys of a batch may differ in length.
    """
    longest = max(map(len, keys))
    ids_BT = torch.tensor([[*key, *[0] * (longest - len(key))] for key in keys], device=last_BKV.device)
    counts_BT = torch.tensor(
        [[number < len(key) for number in range(longest)] for key in keys], device=last_BKV.device
    )
    logits_BTV = last_BKV
    if longest > 1:
        more_BKV, _ = read(loaded, ids_BT[:, :-1].to(loaded.device), copy.deepcopy(cache))
        logits_BTV = torch.cat([last_BKV, more_BKV], 1)
    scores_BT = logits_BTV.double().log_softmax(-1).gather(-1, ids_BT[..., None])[..., 0]
    return (scores_BT * counts_BT).sum(1).cpu()


def _map(lengths: tuple[int, ...], depths: tuple[float, ...], rows: Sequence[Mapping[str, Any]]) -> NeedleMap:
    """Return the map of one kind of needle from the answers at each length, sorted by depth."""
    # Of each length and depth the samples.
    exact_LDN, rank_LDN = (
        np.array([row[name] for row in rows], float).reshape(len(rows), len(depths), -1)
        for name in ("exact", "rank")
    )
    choice_LDN = (rank_LDN == 1).astype(float)

    def grid(value_LDN: Array, of_cell: Callable[[list[float]], float]) -> Grid:
        return tuple(tuple(of_cell(cell_N.tolist()) for cell_N in row_DN) for row_DN in value_LDN)

    def shares(value_LDN: Array, name: str) -> Grid:
        return grid(value_LDN, lambda cell: getattr(proportion(cell), name))

    return NeedleMap(
        lengths=lengths,
        depths=depths,
        samples=exact_LDN.shape[-1],
        accuracy=shares(exact_LDN, "mean"),
        standard_error=shares(exact_LDN, "standard_error"),
        low=shares(exact_LDN, "low"),
        high=shares(exact_LDN, "high"),
        choice=shares(choice_LDN, "mean"),
        choice_standard_error=shares(choice_LDN, "standard_error"),
        rank=grid(rank_LDN, lambda cell: sum(cell) / len(cell)),
        overall=NeedleMeans(
            proportion(exact_LDN.ravel().tolist()),
            proportion(choice_LDN.ravel().tolist()),
            estimate(rank_LDN.ravel().tolist()),
        ),
    )


def _differences(
    found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], other: str
) -> dict[str, NeedleDifference] | None:
    if other not in found:
        return None

    def scores(role: str, kind: str, name: str) -> list[float]:
        return [float(each == 1) for row in found[role][kind] for each in row[name]]

    return {
        kind: NeedleDifference(
            *(
                proportion_difference(scores("student", kind, name), scores(other, kind, name))
                for name in ("exact", "rank")  # right digits are 1, and so is the rank of the right key
            )
        )
        for kind in KINDS
    }


def _depths(count: int) -> tuple[float, ...]:
    """Return `count` evenly spaced depths from 0 to 1; a single one is in the middle."""
    return (0.5,) if count == 1 else tuple(number / (count - 1) for number in range(count))


def _lengths(subject: Subject, haystack: Haystack) -> list[int]:
    """Return the lengths asked for.

    The default is a quarter, a half and all of the positions of every model, up to `LONGEST`, where keys fit.
    """
    limit = subject.limit
    asked = subject.asked(RetrievalSettings).retrieval_lengths
    if asked is None:
        most = min(limit.positions or LONGEST, LONGEST)
        lengths = [length for length in (most // 4, most // 2, most) if length >= haystack.least()]
        return lengths or [most]
    limit.check(f"--retrieval-lengths {asked[-1]}", asked[-1])
    return list(asked)
