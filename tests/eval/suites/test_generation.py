"""What models write is compared on the same prompts, and the KL on drawn text is that of whole distributions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvfold.checkpoints.quality_blocks import GenerationBlock
from kvfold.core.errors import InvalidInput
from kvfold.eval.options import EvalRequest, Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites import generation
from kvfold.eval.suites.answer_tasks import TASKS, question
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.eval.suites.decoding import write
from kvfold.models.causal_lm import load
from kvfold.texts.corpus import Text, read_text

from ...support.conversations import PLAIN, say
from ..conftest import Make

LENGTH = 1500  # bytes are tokens here


@pytest.fixture(scope="session")
def models(make: Make) -> tuple[Path, Path]:
    return (
        make(max_position_embeddings=LENGTH, seed=1),
        make(max_position_embeddings=LENGTH, seed=1, num_key_value_heads=2),
    )


@pytest.fixture
def text(tmp_path: Path) -> Text:
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a fox who read the whole day. " * 200)
    return read_text(str(file))


def run(student: Path, teacher: Path | None, text: Text | None, **settings: Any) -> GenerationBlock:
    found = evaluate(
        student, teacher, text, Options(device="cpu", window=64), suites=("generation",),
        settings=SuiteSettings.read({"generation_prompts": 6, "generation_tokens": 24, **settings}),
    ).suites["generation"]  # fmt: skip
    assert isinstance(found, GenerationBlock)
    return found


def test_no_token_of_the_text_counts_as_scored(models: tuple[Path, Path], text: Text) -> None:
    settings = SuiteSettings.read(
        {"generation_prompts": 1, "generation_tokens": 1, "generation_questions": 0}
    )
    options = Options(device="cpu", window=64)
    for suites, is_scored in ((("generation",), False), (("ppl", "generation"), True)):
        found = evaluate(models[0], None, text, options, suites=suites, settings=settings)
        assert (found.protocol is not None) == is_scored
        assert any("scored" in row[0] for row in found.rows) == is_scored


def test_a_model_next_to_itself_writes_the_same(models: tuple[Path, Path], text: Text) -> None:
    found = run(models[0], models[0], text, generation_questions=2)
    apart = found.difference
    assert apart is not None
    assert (found.prompts, found.tokens, found.questions) == (6, 24, 2 * len(TASKS))
    assert found.student == found.teacher
    assert set(apart.agreement) == {"1", "8"}
    assert all(share.mean == 1 for share in apart.agreement.values())
    assert apart.parting is None
    assert [one.rate for one in apart.parting_by_entropy] == [0] * 4
    assert sum(one.tokens for one in apart.parting_by_entropy) == 6 * 24
    assert apart.kl_own_text.mean == apart.kl_teacher_text.mean == 0
    for accepted in (apart.accepted_greedy, apart.accepted_drawn):
        assert {drafted: one.mean for drafted, one in accepted.items()} == {"1": 1, "2": 2, "4": 4, "8": 8}
    assert apart.right is not None
    assert apart.right.mean == 0


def test_kl_on_drawn_text_is_that_of_whole_distributions(models: tuple[Path, Path], text: Text) -> None:
    """Within four standard errors, since drawn tokens stand for the distribution."""
    student, teacher = models
    found = run(student, teacher, text, generation_prompts=48, generation_questions=0)
    apart = found.difference
    assert apart is not None
    assert found.student.right is None
    prompts = [[0, *text.documents[0].encode()[:15]]] * 48
    chance = torch.rand(48, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    options = Options(device="cpu")
    ours, theirs = load(student, options), load(teacher, options)
    drawn = write(ours, prompts, [24] * 48, 8, "student", chance_NT=chance)
    ids = torch.tensor([[*prompt, *tokens] for prompt, tokens in zip(prompts, drawn, strict=True)])
    with torch.inference_mode():
        p, q = (
            each.model(input_ids=ids).logits[:, len(prompts[0]) - 1 : -1].double().log_softmax(-1)
            for each in (ours, theirs)
        )
    whole = (p.exp() * (p - q)).sum(-1).mean(1)
    error = (float(apart.kl_own_text.standard_error or 0) ** 2 + float(whole.var()) / 48) ** 0.5
    assert abs(apart.kl_own_text.mean - float(whole.mean())) < 4 * error
    assert apart.kl_own_text.mean > 4 * float(apart.kl_own_text.standard_error or 1) > 0


def test_accepted_drafts_are_those_of_whole_distributions(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A drafted token is accepted with the probability Σ min(p, q), or if it is the likeliest."""
    student, teacher = models
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n' * 48)
    apart = run(student, teacher, None, generation_prompts=48, generation_questions=0,
                prompts=tmp_path / "prompts.jsonl").difference  # fmt: skip
    assert apart is not None
    ours, theirs = (load(path, Options(device="cpu")) for path in models)
    prompt = list(theirs.tokenizer("Once upon a time").input_ids)
    chance = torch.rand(48, 24, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def written(chance_NT: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return p and q (N, T, V) of what the teacher writes."""
        texts = write(theirs, [prompt] * 48, [24] * 48, 8, "teacher", chance_NT=chance_NT)
        ids = torch.tensor([[*prompt, *tokens] for tokens in texts])
        with torch.inference_mode():
            logits = [by.model(input_ids=ids).logits[:, len(prompt) - 1 : -1] for by in (theirs, ours)]
        p, q = (found.double().softmax(-1) for found in logits)
        return p, q

    p, q = written(None)
    same = (p.argmax(-1) == q.argmax(-1))[0].double()
    assert apart.accepted_greedy["1"].mean == pytest.approx(float(same.mean()))
    runs = float((same[:-1] + same[:-1] * same[1:]).mean())
    assert apart.accepted_greedy["2"].mean == pytest.approx(runs)
    p, q = written(chance)
    overlap = torch.minimum(p, q).sum(-1).mean(1)
    found = apart.accepted_drawn["1"]
    error = (float(found.standard_error or 0) ** 2 + float(overlap.var()) / 48) ** 0.5
    assert abs(found.mean - float(overlap.mean())) < 4 * error
    assert 0.1 < float(overlap.mean()) < 0.99


def test_greedy_text_is_that_of_transformers(models: tuple[Path, Path]) -> None:
    """Also for prompts of unequal lengths, which stand in another order."""
    loaded = load(models[0], Options(device="cpu"))
    prompts = [[0, 5, 9], [0, 7], [0, 6, 4]]
    written = write(loaded, prompts, [6, 4, 5], 2, "student")
    for prompt, steps, tokens in zip(prompts, (6, 4, 5), written, strict=True):
        ids = torch.tensor([prompt])
        wanted = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=steps,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert tokens == wanted[0, len(prompt) :].tolist()
    short = write(loaded, prompts, [6] * 3, 2, "student", is_over=lambda tokens: len(tokens) == 2)
    assert short == [tokens[:2] for tokens in written]


@pytest.mark.parametrize("task", TASKS)
def test_a_question_knows_its_answer(task: str) -> None:
    asked = question(task, "0/3")
    assert asked == question(task, "0/3") != question(task, "0/4")
    assert asked.is_right(f" {asked.answer} ")
    assert not asked.is_right("")
    assert not asked.is_right(f"{asked.answer}0")
    *shots, last = asked.prompt.splitlines()[1:]
    assert len(shots) == 4
    if task == "arithmetic":
        for line in (*shots, f"{last} {asked.answer}"):
            assert len({eval(side) for side in line.split(" = ")}) == 1
        assert asked.is_right(asked.answer.split()[-1])


def test_prompts_of_a_file(models: tuple[Path, Path], tmp_path: Path, make: Make) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": word * 3}) + "\n" for word in ("one ", "two ", "three ")))
    found = run(models[0], models[1], None, prompts=file, generation_questions=0)
    assert found.prompts == 3
    own = make(max_position_embeddings=LENGTH, seed=4)
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.chat_template = PLAIN
    assert generation._prompts_of(file, tokenizer, 2) == [
        list(tokenizer(word * 3).input_ids) for word in ("one ", "two ")
    ]
    file.write_text(
        json.dumps({"messages": say("hi")}) + "\n" + json.dumps({"messages": say("ho", "a", "b")})
    )
    tokenizer.chat_template = "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"
    with pytest.raises(InvalidInput, match=r"the chat template does not render row 1: .*recursion"):
        generation._prompts_of(file, tokenizer, 9)
    tokenizer.chat_template = PLAIN
    ids = generation._prompts_of(file, tokenizer, 9)
    assert [tokenizer.decode(each) for each in ids] == [
        "<s>[user]hi;[assistant]", "<s>[user]ho;[assistant]a;[user]b;[assistant]"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ('{"text": "a"}\n', {}, r"holds no prompt; its rows should have `prompt`, a text, or `messages`"),
        (
            '{"prompt": "' + "a" * 1490 + '"}\n',
            {},
            r"24 behind a prompt of 1490 tokens exceeds the 1500 positions of .*; use 10 or fewer",
        ),
        ('{"messages": [1]}\n', {}, r"the chat template does not render row 1"),
    ],
)
def test_prompts_that_cannot_be_continued(
    models: tuple[Path, Path], tmp_path: Path, rows: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(rows)
    with pytest.raises(InvalidInput, match=message):
        run(models[0], None, None, prompts=tmp_path / "prompts.jsonl", **settings)


def test_a_text_or_prompts_are_needed(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the suites generation read a text; choose one with --text"):
        EvalRequest.read({"model": str(models[0]), "suites": "generation"})
    EvalRequest.read({"model": str(models[0]), "suites": "generation", "prompts": str(tmp_path)})
    with pytest.raises(
        InvalidInput, match="--prompts belongs to the suite generation, which --suite does not"
    ):
        EvalRequest.read({"model": str(models[0]), "text": "stdlib", "prompts": str(tmp_path)})


def test_by_default_a_continuation_takes_the_positions_that_are_left(make: Make, text: Text) -> None:
    found = run(make(max_position_embeddings=64), None, text, generation_tokens=None, generation_prompts=2)
    assert (found.tokens, found.questions) == (64 - 16, 0)
    assert found.student.right is None
    assert found.difference is None


def test_partings_are_counted_where_they_happen() -> None:
    assert [generation._parting(*pair) for pair in (([1, 2], [1, 2]), ([1, 3], [1, 2]), ([1], [1, 2]))] == [
        None,
        1,
        1,
    ]
    rates = generation._rates([None, 1], [[0.1, 0.2], [0.3, 0.4, 9.0]])
    assert [(one.entropy, one.rate, one.tokens) for one in rates] == [
        (0.1, 0, 1), (0.2, 0, 1), (0.3, 0, 1), (0.4, 1, 1)
    ]  # fmt: skip
    assert generation._repeated([1, 2, 3, 4] * 3) == pytest.approx(1 - 4 / 9)
    assert generation._repeated([1, 2]) == 0
