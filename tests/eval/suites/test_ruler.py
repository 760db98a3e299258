"""Prompts of RULER's tasks hold what they ask for, and answers are scored for the prompt they belong to."""

import re
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvfold.checkpoints.quality_blocks import RulerBlock
from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites import decoding, ruler, speed
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.eval.suites.ruler_tasks import TASKS, RulerTasks, score

from ..conftest import Make

CPU = Options(device="cpu")
LENGTH = 1400  # bytes are tokens here


@pytest.fixture(scope="session")
def wide(make: Make) -> Path:
    return make(max_position_embeddings=LENGTH)


@pytest.fixture(scope="session")
def other(make: Make) -> Path:
    return make(max_position_embeddings=LENGTH, latent=True, seed=3)


@pytest.fixture(scope="session")
def tasks(wide: Path) -> RulerTasks:
    return RulerTasks(wide, AutoTokenizer.from_pretrained(wide))


def run(student: Path, teacher: Path | None = None, **settings: Any) -> RulerBlock:
    found = evaluate(
        student, teacher, None, CPU, suites=("ruler",), settings=SuiteSettings.read(settings)
    ).suites["ruler"]
    assert isinstance(found, RulerBlock)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [LENGTH, 5000])
def test_a_prompt_and_its_answer_have_the_length_and_the_text_holds_the_answers(
    tasks: RulerTasks, wide: Path, task: str, length: int
) -> None:
    prompt = tasks.sample(task, length, "0/0")
    assert len(prompt.ids) + prompt.steps == length
    text = AutoTokenizer.from_pretrained(wide).decode(prompt.ids[1:])
    assert score(text, prompt.answers) == 1
    assert len(set(prompt.answers)) == len(prompt.answers)
    assert score(text.rpartition("\n")[2], prompt.answers) == 0  # the question does not name them
    assert tasks.sample(task, length, "0/0") == prompt
    assert tasks.sample(task, length, "0/1").answers != prompt.answers


def test_the_number_asked_for_is_that_of_the_name(tasks: RulerTasks, wide: Path) -> None:
    prompt = tasks.sample("niah_multikey", LENGTH, "0/2")
    text = AutoTokenizer.from_pretrained(wide).decode(prompt.ids[1:])
    numbers = dict(re.findall(r"The secret number of the (\w+) is (\d+)\.", text))
    asked = re.search(r"\nThe secret number of the (\w+) is$", text)
    assert len(numbers) == 4
    assert prompt.answers == (numbers[asked[1]],)


def test_numbers_are_asked_for_in_the_order_of_their_names(tasks: RulerTasks, wide: Path) -> None:
    prompt = tasks.sample("niah_multiquery", LENGTH, "0/2")
    text = AutoTokenizer.from_pretrained(wide).decode(prompt.ids[1:])
    numbers = dict(re.findall(r"The secret number of the (\w+) is (\d+)\.", text))
    names = text.rpartition("in this order: ")[2].removesuffix(", are").split(", ")
    assert prompt.answers == tuple(numbers[name] for name in names)


def test_variables_are_those_that_the_number_reaches(tasks: RulerTasks, wide: Path) -> None:
    prompt = tasks.sample("vt", LENGTH, "0/0")
    text = AutoTokenizer.from_pretrained(wide).decode(prompt.ids[1:])
    value = re.search(r"the value (\d+) are$", text)
    held: dict[str, str] = {}
    for name, given in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text):
        held[name] = held.get(given, given)  # in the order of the text
    assert {name for name, number in held.items() if number == value[1]} == set(prompt.answers)
    assert len(held) == 10  # an example, and the chain


# The longest text takes each uncommon word of the filler more than ten times.
@pytest.mark.parametrize(
    ("task", "count", "length"),
    [("cwe", 10, LENGTH), ("cwe", 10, 9000), ("cwe", 10, 400_000), ("fwe", 3, LENGTH), ("fwe", 3, 9000)],
)
def test_frequent_words_are_the_most_frequent_ones_with_a_gap(
    tasks: RulerTasks, wide: Path, task: str, count: int, length: int
) -> None:
    prompt = tasks.sample(task, length, "0/0")
    text = AutoTokenizer.from_pretrained(wide).decode(prompt.ids[1:])
    listed = text.split("\n")[-2]
    ranked = Counter(re.findall(r"[a-z]+", listed)).most_common()
    assert {word for word, _ in ranked[:count]} == set(prompt.answers)
    assert len(ranked) > count
    assert ranked[count - 1][1] > ranked[count][1]


def test_a_text_too_short_to_have_a_third_most_frequent_word_is_refused(tasks: RulerTasks) -> None:
    with pytest.raises(InvalidInput, match="leaves no room for the task fwe"):
        tasks.sample("fwe", 300, "0/0")


def test_each_prompt_gets_its_own_answer_whatever_is_read_together(tasks: RulerTasks, wide: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(wide)
    prompts = [tasks.sample(task, LENGTH, f"0/{n}") for n in range(3) for task in ("niah_single", "vt")]
    says = {
        prompt.ids: list(
            tokenizer(f" {', '.join(prompt.answers[: 1 + n])}", add_special_tokens=False).input_ids
        )
        for n, prompt in enumerate(prompts)
    }

    def forward(input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> SimpleNamespace:
        rows = input_ids.tolist() if past_key_values is None else past_key_values
        done = 0 if past_key_values is None else len(rows[0][1])
        states = [(tuple(row), []) for row in rows] if past_key_values is None else rows
        logits_BTV = torch.zeros(len(states), 1, len(tokenizer))
        for row, (ids, said) in enumerate(states):
            wanted = says[ids][done] if done < len(says[ids]) else tokenizer.eos_token_id
            logits_BTV[row, 0, wanted] = 1.0
            said.append(wanted)
        return SimpleNamespace(logits=logits_BTV, past_key_values=states)

    class Speaker:
        def __init__(self) -> None:
            self.forward = forward

        __call__ = staticmethod(forward)

    loaded = SimpleNamespace(model=Speaker(), tokenizer=tokenizer, device=torch.device("cpu"), path=wide)
    subject: Any = SimpleNamespace(load=lambda _: loaded, options=SimpleNamespace(batch_size=2))
    wanted = [min(1.0, (1 + n) / len(prompt.answers)) for n, prompt in enumerate(prompts)]
    assert ruler._ask(subject, "student", prompts) == pytest.approx(wanted)


def test_the_same_model_differs_by_nothing_and_the_block_has_every_task(wide: Path, other: Path) -> None:
    asked = {"ruler_samples": 2, "ruler_lengths": "900", "ruler_tasks": "vt,niah_single"}
    found = run(other, other, **asked)
    assert found.tasks == ("niah_single", "vt")
    assert found.lengths == (900,)
    assert found.difference.mean == 0
    assert found.student == found.teacher
    assert run(wide, **asked).difference is None


def test_lengths_are_half_and_all_of_the_positions(wide: Path) -> None:
    found = run(wide, ruler_samples=1, ruler_tasks="niah_single")
    assert found.lengths == (LENGTH // 2, LENGTH)


def test_what_does_not_fit_is_left_out_unless_asked_for(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    found = run(make(max_position_embeddings=450), ruler_samples=1)
    assert found.lengths == (450,)
    assert found.tasks == tuple(task for task in TASKS if task != "cwe")
    assert "--suite ruler leaves out cwe: no room in 450 tokens" in caplog.text


def test_prompts_without_room_are_refused_before_others(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "measure", lambda _: pytest.fail("it was measured"))
    settings = {"ruler_lengths": "60", "ruler_tasks": "vt"}
    with pytest.raises(InvalidInput, match="leaves no room for the task vt"):
        evaluate(wide, None, None, CPU, suites=("speed", "ruler"), settings=SuiteSettings.read(settings))


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"ruler_lengths": "1500"}, f"--ruler-lengths 1500 exceeds the {LENGTH} positions of .*; use {LENGTH}"),
    (
        {"ruler_lengths": "60"},
        "--ruler-lengths 60 leaves no room for the tasks niah_single, .*, fwe in the tokens of .*; use "
        "longer prompts$",
    ),
    ({"ruler_lengths": "60,450", "ruler_tasks": "vt,niah_single,cwe"},
     "--ruler-lengths 60 leaves no room for the tasks niah_single, vt, and 450 for cwe in the .*"),
    ({"ruler_lengths": "long"}, "ruler_lengths is 'long'; it should be whole numbers"),
    ({"ruler_tasks": "vt,qa_1"}, "ruler_tasks is 'qa_1'; it should be 'niah_single', .*"),
])  # fmt: skip
def test_mistakes_are_one_sentence(wide: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        run(wide, ruler_samples=1, **settings)


@pytest.mark.parametrize(
    ("lengths", "shown"), [({}, "64, the default, leaves"), ({"ruler_lengths": "64"}, "64 leaves")]
)
def test_longer_prompts_are_not_advised_where_the_model_has_no_more_positions(
    make: Make, lengths: dict[str, Any], shown: str
) -> None:
    short = make(max_position_embeddings=64)
    with pytest.raises(
        InvalidInput,
        match=f"^--ruler-lengths {shown} no room for the task vt in the tokens of .*, and the models have no "
        "more positions; name other tasks with --ruler-tasks$",
    ):
        run(short, ruler_samples=1, ruler_tasks="vt", **lengths)
    with pytest.raises(InvalidInput, match=r"no more positions; leave out --suite ruler$"):
        run(short, ruler_samples=1, **lengths)


def test_one_cache_exists_at_a_time(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of prompts that are answered is freed before the next are read."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    before, read = list[int](), decoding.read

    def counted(loaded: Any, ids_BT: torch.Tensor, cache: Any = None, **how: Any) -> tuple[torch.Tensor, Any]:
        if cache is None:
            before.append(len(alive))
        logits_BKV, cache = read(loaded, ids_BT, cache, **how)
        alive.add(cache)
        return logits_BKV, cache

    monkeypatch.setattr(decoding, "read", counted)
    settings = {"ruler_tasks": "niah_single", "ruler_lengths": "700", "ruler_samples": 3}
    one_by_one = Options(device="cpu", batch_size=1)
    evaluate(wide, None, None, one_by_one, suites=("ruler",), settings=SuiteSettings.read(settings))
    assert before == [0, 0, 0]
