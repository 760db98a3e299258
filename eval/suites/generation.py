"""The suite `generation`: what models write, on the same prompts with the same chances.

Texts are continued greedily and at temperature 1, and short questions are answered greedily
(answer_tasks.py). Loss and KL on given text do not show how a model's own mistakes add up, nor whether an
answer ends: a distilled model within 0.2 points of its teacher by likelihood can be 20.8 points behind when
it generates (arXiv 2603.26556).

The KL on drawn text is the mean of log p - log q of the tokens that p drew, so it takes no distribution over
the whole vocabulary and models need not be in memory together.

Legend: N prompts, P tokens of a prompt, T tokens behind it.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from ...checkpoints.quality_blocks import (
    Estimate,
    GenerationBlock,
    GenerationDifference,
    ModelGeneration,
    PartingRate,
)
from ...core.console import notice, progress
from ...core.errors import InvalidInput
from ...models.causal_lm import Loaded
from ...models.load_failures import TEMPLATE_FAILURES
from ...texts.document_rows import DocumentSource, NoField
from ...texts.sources import first_rows
from ..estimate import estimate, proportion, proportion_difference
from ..subject import Subject
from .answer_tasks import TASKS, Question, question
from .catalogue import GenerationSettings
from .decoding import batches, read, write

LONGEST_PROMPT = 64  # tokens at the beginning of a window that are continued
LONGEST_TEXT = 128  # tokens of a continuation, unless --generation-tokens says otherwise
LONGEST_ANSWER = 64
AGREEMENT = (1, 8, 32, 128, 512)
DRAFTED = (1, 2, 4, 8)  # tokens that a model drafts for its teacher at once
RUN = 4  # tokens of a run that may be repeated
KINDS = ("greedy", "drawn")
Texts = list[list[int]]
# `nll` and `entropy` of each token of each text, nats, and whether the token is the likeliest (`top`, 0 or 1)
Reading = dict[str, list[list[float]]]


class Answer(NamedTuple):
    """An answer: whether it is right, whether it ended, and its tokens with its end."""

    right: bool
    ended: bool
    tokens: int


@dataclass(frozen=True)
class Assignment:
    """Prompts and questions, the same for every model.

    Attributes:
        prompts: texts to continue, in tokens.
        steps: tokens of a continuation.
        questions: with their tokens.
    """

    prompts: Texts
    steps: int
    questions: list[tuple[Question, list[int]]]


def rows(found: GenerationBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    models: list[ModelGeneration] = [getattr(found, role) for role in roles]
    by_role = {"student": found.difference, "parent": found.parent_difference}
    differences = [by_role.get(role) for role in roles]

    def line(label: str, values: Iterable[Any]) -> list[str]:
        return [label, *("" if each is None else str(each) for each in values)]

    def of(field: str, key: str | None = None) -> list[Any]:
        """Return a field of each model or, where models have none, of its difference from the teacher."""
        holders = models if hasattr(models[0], field) else differences
        values = [None if one is None else getattr(one, field) for one in holders]
        return values if key is None else [None if each is None else each[key] for each in values]

    lines = [line("answers right", of("right"))]
    lines += [line(f"  {task}", of("by_task", task)) for task in models[0].by_task]
    lines += [
        line("  answers that do not end", of("endless")),
        line("  tokens of an answer", of("length")),
        line("runs of four tokens repeated", of("repeated")),
        line("nats per token of its own text", of("nll")),
    ]
    if found.difference is not None:
        rights = [None if one is None else one.right for one in differences]
        ratios = [None if one is None else one.length for one in differences]
        lines += [
            line("answers right, - teacher's", rights),
            line("  of the teacher's right ones", of("kept")),
            line("  tokens of an answer, times the teacher's", ratios),
        ]
        for tokens in found.difference.agreement:
            label = f"greedy text as the teacher's for {tokens} tokens"
            lines.append(line(label, of("agreement", tokens)))
        for kind in KINDS:
            for tokens in getattr(found.difference, f"accepted_{kind}"):
                label = f"accepted of {tokens} tokens drafted for the teacher, {kind}"
                lines.append(line(label, of(f"accepted_{kind}", tokens)))
        lines += [
            line("KL on its own text, nats", of("kl_own_text")),
            line("KL on the teacher's text, nats", of("kl_teacher_text")),
        ]
    return [cells for cells in lines if any(cells[1:])]


def check_room(subject: Subject) -> None:
    """Check that prompts and answers fit into every model's positions."""
    subject.once(_assignment)


def measure(subject: Subject) -> GenerationBlock:
    """Let every model write, and read what it and its teacher wrote."""
    work, settings = subject.once(_assignment), subject.asked(GenerationSettings)
    digest = hashlib.sha256(json.dumps(work.prompts).encode()).hexdigest()
    part = f"generation/{digest[:16]}"  # the file of --prompts may change before a run is resumed
    has_teacher = "teacher" in subject.roles
    others = [role for role in subject.roles if role != "teacher"] if has_teacher else []
    readings = [(role, role, "drawn") for role in subject.roles]
    readings += [pair for role in others for pair in ((role, "teacher", "drawn"), ("teacher", role, "drawn"))]
    readings += [(role, "teacher", "greedy") for role in subject.roles] if has_teacher else []
    texts: dict[tuple[str, str], Texts] = {}
    answers: dict[str, list[Answer]] = {}
    units = [(role, kind) for role in subject.roles for kind in (*KINDS, "answers")]
    for role, kind in progress(units, "Writing", len(units)):
        do: Callable[[], Any] = partial(_write, subject, role, kind, work)
        if kind == "answers":
            do = partial(_answer, subject, role, work)
        found = subject.part(f"{part}/{role}/{kind}", do)
        if kind == "answers":
            answers[role] = [Answer(*one) for one in found]
        else:
            texts[role, kind] = found
    read_by: dict[tuple[str, str, str], Reading] = {}
    readings.sort(key=lambda one: subject.roles.index(one[0]))  # each model is loaded once
    for reader, writer, kind in progress(readings, "Reading", len(readings)):
        do = partial(_read, subject, reader, work.prompts, texts[writer, kind])
        read_by[reader, writer, kind] = subject.part(f"{part}/{reader}/{writer}/{kind}", do)
    models = {role: _model(work, answers[role], texts[role, "greedy"], read_by[role, role, "drawn"]["nll"])
              for role in subject.roles}  # fmt: skip
    differences = {
        role: _difference(
            answers[role],
            answers["teacher"],
            texts[role, "greedy"],
            texts["teacher", "greedy"],
            role,
            read_by,
        )
        for role in others
    }
    return GenerationBlock(
        prompts=len(work.prompts),
        prompts_sha256=digest,
        questions=len(work.questions),
        tokens=work.steps,
        seed=settings.generation_seed,
        student=models["student"],
        teacher=models.get("teacher"),
        parent=models.get("parent"),
        difference=differences.get("student"),
        parent_difference=differences.get("parent"),
    )


def _assignment(subject: Subject) -> Assignment:
    """Return what every model is asked.

    Raises:
        InvalidInput: there is nothing to continue, or a prompt and its continuation exceed a model's
            positions.
    """
    settings, tokenizer = subject.asked(GenerationSettings), subject.described("student").tokenizer
    positions, steps = subject.limit.positions, settings.generation_tokens or LONGEST_TEXT
    if settings.prompts is not None:
        prompts = _prompts_of(settings.prompts, tokenizer, settings.generation_prompts)
    else:
        windows = subject.windows
        length = min(LONGEST_PROMPT, windows.length // 4)
        if length < 1:
            raise InvalidInput(f"--window {windows.length} leaves no beginning to continue; use 4 or more")
        prompts = windows.ids_NW[: settings.generation_prompts, :length].tolist()
    longest = max(map(len, prompts))
    room = steps if positions is None else positions - longest
    if settings.generation_tokens is None:
        steps = min(steps, max(1, room))
    if steps > room:
        remedy = f"use {room} or fewer" if room > 0 else "give shorter prompts"
        raise InvalidInput(
            f"--generation-tokens {steps} behind a prompt of {longest} tokens exceeds the {positions} "
            f"positions of {subject.limit.path}; {remedy}"
        )
    head = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    questions = []
    for task in TASKS:
        for number in range(settings.generation_questions):
            asked = question(task, f"{settings.generation_seed}/{number}")
            ids = head + list(tokenizer(asked.prompt, add_special_tokens=False, verbose=False).input_ids)
            if positions is None or len(ids) + LONGEST_ANSWER <= positions:
                questions.append((asked, ids))
    left_out = settings.generation_questions * len(TASKS) - len(questions)
    if left_out:
        notice(f"--suite generation leaves out {left_out} questions: no room in {positions} positions")
    return Assignment(prompts, steps, questions)


def _prompts_of(file: Path, tokenizer: Any, count: int) -> Texts:
    """Return the prompts of a file: rows with `prompt`, a text, or `messages`, a conversation to answer.

    Raises:
        InvalidInput: no row has either, or the chat template refuses one.
    """
    found: Texts = []
    for number, row in enumerate(_rows_of(file, count), 1):
        prompt, messages = row.get("prompt"), row.get("messages")
        if isinstance(prompt, str) and prompt:
            found.append(list(tokenizer(prompt, verbose=False).input_ids))
        elif isinstance(messages, list) and messages:
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except TEMPLATE_FAILURES as error:
                raise InvalidInput(
                    f"--prompts {file}: the chat template does not render row {number}: {error}"
                ) from None
            found.append(list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))
    found = [ids for ids in found if ids]
    if not found:
        raise InvalidInput(
            f"--prompts {file} holds no prompt; its rows should have `prompt`, a text, or `messages`, a list "
            "of {role, content}"
        )
    return found


def _rows_of(file: Path, count: int) -> list[dict[str, Any]]:
    for field in ("prompt", "messages"):
        with suppress(NoField):
            return first_rows(DocumentSource(str(file), field, option="--prompts"), count)
    return []


def _ends(subject: Subject) -> frozenset[int]:
    """Return the tokens that end a text of the models."""
    described = subject.described("student")
    given = described.config.get_text_config().eos_token_id
    listed = given if isinstance(given, list | tuple) else [given]
    return frozenset(token for token in (*listed, described.tokenizer.eos_token_id) if token is not None)


def _write(subject: Subject, role: str, kind: str, work: Assignment) -> Texts:
    """Return what a model writes behind each prompt."""
    ends, chance_NT = _ends(subject), None
    if kind == "drawn":
        draw = torch.Generator().manual_seed(subject.asked(GenerationSettings).generation_seed)
        chance_NT = torch.rand(len(work.prompts), work.steps, generator=draw, dtype=torch.float64)
    return write(
        subject.load(role), work.prompts, [work.steps] * len(work.prompts), subject.options.batch_size, role,
        chance_NT=chance_NT, is_over=lambda tokens: tokens[-1] in ends,
    )  # fmt: skip


def _answer(subject: Subject, role: str, work: Assignment) -> list[Answer]:
    """Return how a model answers each question, up to the end of the answer's line."""
    loaded, ends = subject.load(role), _ends(subject)

    def said(tokens: list[int]) -> str:
        text: str = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        return text.lstrip(" ")

    def is_over(tokens: list[int]) -> bool:
        return tokens[-1] in ends or "\n" in said(tokens)

    steps = [LONGEST_ANSWER] * len(work.questions)
    prompts = [ids for _, ids in work.questions]
    written = write(loaded, prompts, steps, subject.options.batch_size, role, is_over=is_over)
    return [
        Answer(asked.is_right(said(tokens).partition("\n")[0]), is_over(tokens), len(tokens))
        for (asked, _), tokens in zip(work.questions, written, strict=True)
    ]


def _read(subject: Subject, role: str, prompts: Texts, texts: Texts) -> Reading:
    """Return what a model predicts for each token of the texts behind their prompts."""
    loaded = subject.load(role)
    found: dict[int, dict[str, list[float]]] = {}
    for batch in batches(prompts, subject.options.batch_size):
        found.update(zip(batch, _losses(loaded, batch, prompts, texts), strict=True))
    return {name: [found[number][name] for number in range(len(texts))] for name in ("nll", "entropy", "top")}


@torch.inference_mode()
def _losses(loaded: Loaded, batch: list[int], prompts: Texts, texts: Texts) -> list[dict[str, list[float]]]:
    longest = max(len(texts[number]) for number in batch)
    # Nothing attends to what follows it, so any token will do behind a text that has ended.
    rows = [[*prompts[number], *texts[number], *[0] * (longest - len(texts[number]))] for number in batch]
    ids_BT = torch.tensor(rows, device=loaded.device)
    logits_BTV, _ = read(loaded, ids_BT[:, :-1], last=longest)
    found = []
    for number, row_TV in zip(batch, logits_BTV, strict=True):
        text_T = torch.tensor(texts[number], device=loaded.device)
        log_TV = row_TV[: len(text_T)].float().log_softmax(-1)
        nll_T = -log_TV.gather(1, text_T[:, None])[:, 0]
        entropy_T = -(log_TV.exp() * log_TV.clamp_min(torch.finfo(log_TV.dtype).min)).sum(-1)
        top_T = (log_TV.argmax(-1) == text_T).float()
        found.append({"nll": nll_T.tolist(), "entropy": entropy_T.tolist(), "top": top_T.tolist()})
    return found


def _model(work: Assignment, answers: list[Answer], greedy: Texts, nll: list[list[float]]) -> ModelGeneration:
    of_task: dict[str, list[float]] = {}
    for (asked, _), answer in zip(work.questions, answers, strict=True):
        of_task.setdefault(asked.task, []).append(float(answer.right))
    lengths = [float(answer.tokens) for answer in answers if answer.ended]
    return ModelGeneration(
        right=proportion(_rights(answers)) if answers else None,
        by_task={task: proportion(scores) for task, scores in of_task.items()},
        length=estimate(lengths) if lengths else None,
        endless=proportion([float(not answer.ended) for answer in answers]) if answers else None,
        repeated=estimate([_repeated(text) for text in greedy]),
        nll=_mean(nll),
    )


def _rights(answers: list[Answer]) -> list[float]:
    return [float(answer.right) for answer in answers]


def _difference(
    answers: list[Answer],
    teachers: list[Answer],
    greedy: Texts,
    teachers_greedy: Texts,
    role: str,
    read_by: Mapping[tuple[str, str, str], Reading],
) -> GenerationDifference:
    """Return a model against its teacher."""
    pairs = list(zip(answers, teachers, strict=True))
    kept = [float(ours.right) for ours, theirs in pairs if theirs.right]
    both = [(ours.tokens, theirs.tokens) for ours, theirs in pairs if ours.ended and theirs.ended]
    together = list(zip(greedy, teachers_greedy, strict=True))
    partings = [_parting(ours, theirs) for ours, theirs in together]
    longest = max(len(theirs) for theirs in teachers_greedy)
    middle = median(math.inf if at is None else at for at in partings)

    def kl(reader: str, writer: str) -> Estimate:
        losses = zip(
            read_by[reader, writer, "drawn"]["nll"], read_by[writer, writer, "drawn"]["nll"], strict=True
        )
        return _mean([[its - own for its, own in zip(*texts, strict=True)] for texts in losses])

    return GenerationDifference(
        right=proportion_difference(_rights(answers), _rights(teachers)) if answers else None,
        kept=proportion(kept) if kept else None,
        length=_ratio(both),
        agreement={
            str(tokens): proportion([float(ours[:tokens] == theirs[:tokens]) for ours, theirs in together])
            for tokens in AGREEMENT
            if tokens <= longest
        },
        parting=None if math.isinf(middle) else middle,
        parting_by_entropy=_rates(partings, read_by["teacher", "teacher", "greedy"]["entropy"]),
        kl_own_text=kl("teacher", role),
        kl_teacher_text=kl(role, "teacher"),
        accepted_greedy=_accepted(read_by[role, "teacher", "greedy"]["top"]),
        accepted_drawn=_accepted(
            [
                [min(1.0, math.exp(own - its)) for its, own in zip(*texts, strict=True)]
                for texts in zip(
                    read_by[role, "teacher", "drawn"]["nll"],
                    read_by["teacher", "teacher", "drawn"]["nll"],
                    strict=True,
                )
            ]
        ),
    )


def _accepted(chances: list[list[float]]) -> dict[str, Estimate]:
    """Return how many of N tokens that a model drafts its teacher accepts, by N, from every place of a text.

    With p of the teacher and q of the draft, a run of tokens is drafted and accepted with probability
    Π min(p, q) (Leviathan et al., 2023, Speculative decoding). That is the mean of Π min(1, q/p) over runs
    that the teacher draws, so its own text shows it without bias.

    Args:
        chances: min(1, q/p) of the teacher's tokens, or whether a greedy draft has the same one.
    """
    found = {}
    for drafted in DRAFTED:
        runs = [
            np.lib.stride_tricks.sliding_window_view(text, drafted)
            for text in chances
            if len(text) >= drafted
        ]
        if runs:
            means = [float(text.cumprod(1).sum(1).mean()) for text in runs]
            found[str(drafted)] = estimate(means, [float(len(text)) for text in runs])
    return found


def _parting(ours: list[int], theirs: list[int]) -> int | None:
    """Return the place of the first token that differs; None where there is none."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    shorter = min(len(ours), len(theirs))
    first = next((at for at, (mine, its) in pairs if mine != its), shorter)
    return None if first == max(len(ours), len(theirs)) else first


def _rates(partings: list[int | None], entropy: list[list[float]]) -> tuple[PartingRate, ...]:
    """Return how often texts part, by quartile of the teacher's entropy at the places up to the parting."""
    seen: list[tuple[float, bool]] = []
    for at, values in zip(partings, entropy, strict=True):
        common = values if at is None else values[: at + 1]
        seen += [(value, place == at) for place, value in enumerate(common)]
    seen.sort()
    quarters = np.array_split(np.array(seen, dtype=np.float64).reshape(-1, 2), 4)
    return tuple(
        PartingRate(entropy=float(some[-1, 0]), rate=float(some[:, 1].mean()), tokens=len(some))
        for some in quarters
        if len(some)
    )


def _ratio(both: list[tuple[int, int]]) -> Estimate | None:
    """Return the ratio of the mean lengths of answers, ours to the teacher's; paired by question."""
    return estimate([own / its for own, its in both], [its for _, its in both]) if both else None


def _repeated(text: list[int]) -> float:
    """Return the share of a text's runs of `RUN` tokens that stood in it before."""
    runs = [tuple(text[at : at + RUN]) for at in range(len(text) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _mean(values: list[list[float]]) -> Estimate:
    """Return the mean over all tokens, with an error over texts."""
    return estimate([math.fsum(text) / len(text) for text in values], [float(len(text)) for text in values])
