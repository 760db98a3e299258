"""Prompts are what they claim to be, and a model that knows the answer gets it right."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvfold.checkpoints.quality_blocks import RetrievalBlock
from kvfold.core.errors import InvalidInput
from kvfold.eval.cli import main
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites import retrieval
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.eval.suites.haystack import CANDIDATES, KINDS, STEPS, Haystack, NeedlePrompt, prose
from kvfold.eval.suites.retrieval import answer, rank
from kvfold.models.causal_lm import Loaded, load

from ...support.commands import run_main
from ..conftest import Make

CPU = Options(device="cpu")
SMALL = {"retrieval_lengths": "360", "retrieval_depths": 2, "retrieval_samples": 3, "retrieval_keys": 3}


@pytest.fixture(scope="session")
def roomy(make: Make) -> Path:
    return make(max_position_embeddings=400)


@pytest.fixture(scope="session")
def latent(make: Make) -> Path:
    return make(max_position_embeddings=400, latent=True, seed=3)


@pytest.fixture(scope="session")
def haystack(roomy: Path) -> Haystack:
    return Haystack(roomy, AutoTokenizer.from_pretrained(roomy), 3)


def run(
    student: Path, teacher: Path | None = None, options: Options = CPU, **settings: Any
) -> RetrievalBlock:
    found = evaluate(
        student, teacher, None, options, suites=("retrieval",), settings=SuiteSettings.read(SMALL | settings)
    ).suites["retrieval"]
    assert isinstance(found, RetrievalBlock)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [360, 777])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_prompt_has_its_length_its_key_at_its_depth_and_nothing_else_with_digits(
    haystack: Haystack, roomy: Path, kind: str, length: int, depth: float
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(roomy)
    sample = haystack.sample(kind, length, depth, "0/0")
    assert len(sample.ids) == length - STEPS
    assert sample.ids[0] == tokenizer.bos_token_id
    text = tokenizer.decode(sample.ids[1:])
    body, _, question = text.rpartition("\n")
    name = question.removeprefix("The secret number").removesuffix(" is")
    assert [match[1] for match in re.finditer(rf" The secret number{name} is (\d+)\.", body)] == [sample.key]
    assert len(set(re.findall(r"\d+", body))) == (1 if kind == "passkey" else 3)
    # Tokens are bytes: the filler before the key, and the filler of all.
    needle = re.compile(r" The secret number[a-z ]* is \d+\.( Remember: the secret number is \d+\.)?")
    before = len(
        needle.sub("", body[: body.index(f"{name} is {sample.key}")]).removesuffix(" The secret number")
    )
    whole = len(needle.sub("", body))
    assert abs(before - depth * whole) <= max(map(len, prose())) / 2 + 1
    assert tokenizer.decode(sample.question[1:]) == "\n" + question
    assert sample.ids[-len(sample.question) + 1 :] == sample.question[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_ten_numbers_with_the_key_first(haystack: Haystack, roomy: Path, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(roomy)
    sample = haystack.sample(kind, 360, 0.5, "0/1")
    texts = [tokenizer.decode(candidate) for candidate in sample.candidates]
    assert texts[0] == " " + sample.key
    assert len(set(texts)) == CANDIDATES
    assert len({len(candidate) for candidate in sample.candidates}) == 1
    others = set(re.findall(r"\d+", tokenizer.decode(sample.ids))) - {sample.key}
    assert {" " + key for key in others} <= set(texts[1:])  # the other keys of the text are distractors


def test_prompts_are_the_same_for_the_same_seed_and_others_for_another(haystack: Haystack) -> None:
    first, again, other = (haystack.sample("passkey", 360, 0.5, seed) for seed in ("0/0", "0/0", "1/0"))
    assert first == again
    assert first.key != other.key
    assert len(prose()) > 300
    assert not any(character.isdigit() for sentence in prose() for character in sentence)


class Knowing:
    """In place of a model: continues a line as after the same words before; its cache is the text."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> SimpleNamespace:
        before = past_key_values or [[] for _ in input_ids]
        texts = [[*old, *new] for old, new in zip(before, input_ids.tolist(), strict=True)]
        count = input_ids.shape[1]
        logits_BTV = torch.stack([self._logits(ids, len(ids) - count) for ids in texts])
        return SimpleNamespace(logits=logits_BTV, past_key_values=texts)

    __call__ = forward

    def _logits(self, ids: list[int], start: int) -> torch.Tensor:
        logits_TV = torch.zeros(len(ids) - start, 258)
        for row in range(len(logits_TV)):
            text = self.tokenizer.decode(ids[: start + row + 1])
            line = text.rpartition("\n")[2] if "\n" in text else "-"
            found = text.find(line)
            if 0 <= found < len(text) - len(line):
                after = self.tokenizer(text[found + len(line)], add_special_tokens=False).input_ids[0]
                logits_TV[row, after] = 9.0
        return logits_TV


def test_a_model_that_reads_the_text_finds_every_key(haystack: Haystack, roomy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(roomy)
    loaded: Any = SimpleNamespace(
        model=Knowing(tokenizer), tokenizer=tokenizer, device=torch.device("cpu"), path=roomy, positions=400
    )
    for kind in KINDS:
        batch = [haystack.sample(kind, 360, depth, f"0/{depth}") for depth in (0.0, 0.3, 1.0)]
        digits, score_BC = answer(loaded, batch)
        assert digits == [sample.key for sample in batch]
        assert rank(score_BC).tolist() == [1, 1, 1]


@pytest.mark.parametrize("which", ["roomy", "latent"])
def test_scores_and_digits_are_those_of_whole_forward_passes(
    haystack: Haystack, request: pytest.FixtureRequest, which: str
) -> None:
    directory: Path = request.getfixturevalue(which)
    loaded = load(directory, CPU)
    batch = [haystack.sample("passkey", 360, depth, "5") for depth in (0.0, 1.0)]
    batch = [
        batch[0],
        NeedlePrompt(
            batch[1].ids, batch[1].question, batch[1].key, tuple(c[:4] for c in batch[1].candidates)
        ),
    ]
    digits, score_BC = answer(loaded, batch)
    for row, sample in enumerate(batch):
        for column, candidate in enumerate(sample.candidates):
            by_text = log_likelihood(loaded, sample.ids, candidate)
            assert float(score_BC[row, column]) == pytest.approx(
                by_text - log_likelihood(loaded, sample.question, candidate), abs=1e-3
            )
        ids = list(sample.ids)
        for _ in range(STEPS):
            with torch.inference_mode():
                ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax()))
        text = loaded.tokenizer.decode(ids[len(sample.ids) :])
        assert digits[row] == (re.findall(r"\d+", text) or [""])[0]


def log_likelihood(loaded: Loaded, prompt: tuple[int, ...], key: tuple[int, ...]) -> float:
    with torch.inference_mode():
        logits_TV = loaded.model(torch.tensor([[*prompt, *key]])).logits[0].double().numpy()
    total = 0.0
    for at, token in enumerate(key, len(prompt) - 1):
        row = logits_TV[at]
        total += row[token] - (row.max() + math.log(np.exp(row - row.max()).sum()))
    return total


def test_ranks_count_ties_a_half() -> None:
    assert rank(torch.tensor([[3.0, 1.0, 2.0], [1.0, 3.0, 1.0], [0.0, 0.0, 0.0]])).tolist() == [1, 2.5, 2]


def test_the_map_has_lengths_and_depths(roomy: Path, latent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Per prompt, sorted by depth: what the student gets right, what the teacher, and ranks.
    told = {
        "student": {360: ([1, 1, 1, 0, 1, 0], [1, 1, 1, 4, 1, 1.5]), 380: ([0] * 6, [10.0] * 6)},
        "teacher": {360: ([1] * 6, [1.0] * 6), 380: ([1, 0, 0, 0, 0, 0], [1.0, 2, 2, 2, 2, 2])},
    }

    def ask(subject: Any, role: str, prompts: list[NeedlePrompt]) -> dict[str, Any]:
        exact, ranks = told[role][len(prompts[0].ids) + STEPS]
        return {"exact": exact, "rank": ranks}

    monkeypatch.setattr(retrieval, "_ask", ask)
    found = run(roomy, latent, retrieval_lengths="380,360")
    grid = found.student["passkey"]
    assert (grid.lengths, grid.depths, grid.samples) == ((360, 380), (0.0, 1.0), 3)
    assert grid.accuracy == ((1.0, pytest.approx(1 / 3)), (0.0, 0.0))
    assert grid.choice == ((1.0, pytest.approx(1 / 3)), (0.0, 0.0))
    assert grid.rank[0] == (1.0, pytest.approx(6.5 / 3))
    z = 1.959963984540054  # Wilson 1927, by hand, for one right of three
    centre, half = (1 / 3 + z * z / 6) / (1 + z * z / 3), z * math.sqrt(2 / 27 + z * z / 36) / (1 + z * z / 3)
    assert (grid.low[0][1], grid.high[0][1]) == (pytest.approx(centre - half), pytest.approx(centre + half))
    assert grid.standard_error[0][1] == pytest.approx(half / z)
    assert grid.overall.accuracy.mean == pytest.approx(4 / 12)
    changes = np.array([0, 0, 0, -1, 0, -1, -1, 0, 0, 0, 0, 0])
    difference = found.difference["passkey"].accuracy
    assert difference.mean == pytest.approx(changes.mean())
    assert difference.low is not None
    assert difference.low < difference.mean
    assert (found.candidates, found.chance, found.parent) == (10, 0.1, None)


def test_the_same_model_differs_by_nothing_one_at_a_time_too(latent: Path, roomy: Path) -> None:
    found = run(latent, latent)
    assert {(one.accuracy.mean, one.choice.mean) for one in found.difference.values()} == {(0, 0)}
    together = run(latent, roomy, Options(device="cpu", batch_size=4))
    assert run(latent, roomy, Options(device="cpu", batch_size=4, one_at_a_time=True)) == together
    assert together.student["passkey"].rank == found.student["passkey"].rank


def test_lengths_fit_the_models_when_none_are_asked_for(roomy: Path, haystack: Haystack) -> None:
    least = haystack.least()
    assert 100 < least <= 200
    assert run(roomy, retrieval_lengths=None, retrieval_samples=1).student["multikey"].lengths == (200, 400)
    haystack.sample("multikey", least, 0.5, "0/0")


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"retrieval_lengths": "401"},
     "--retrieval-lengths 401 exceeds the 400 positions of .*; use 400 or fewer"),
    ({"retrieval_lengths": "30"},
     r"--retrieval-lengths 30 leaves no room for the keys of passkey .*; use \d+ or more"),
    ({"retrieval_lengths": "many"}, "retrieval_lengths is 'many'; it should be whole numbers"),
])  # fmt: skip
def test_mistakes_are_one_sentence(roomy: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        run(roomy, **settings)


def test_a_tokenizer_without_digits_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with pytest.raises(InvalidInput, match="does not distinguish numbers"):
        Haystack(Path("words"), tokenizer, 3).sample("passkey", 100, 0.5, "0")


def test_a_model_that_gives_nan_is_refused(roomy: Path, haystack: Haystack) -> None:
    loaded = load(roomy, CPU)
    loaded.model.model.layers[1].mlp.down_proj.weight.data.fill_(math.nan)
    with pytest.raises(InvalidInput, match=r"the student, .*not finite.*model\.layers\.1\.mlp\.down_proj"):
        answer(loaded, [haystack.sample("passkey", 360, 0.5, "0")], "student")


def test_the_report_holds_the_map_and_an_interrupted_run_goes_on(
    latent: Path, roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "eval.json"
    command = f"{latent} --teacher {roomy} --suite retrieval --device cpu --out {out}".split()
    command += [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    real, asked = retrieval.answer, list[str]()

    def stop(loaded: Any, batch: Any, role: str) -> Any:
        asked.append(role)
        if role == "teacher" and len(asked) < 4:
            raise KeyboardInterrupt
        return real(loaded, batch, role)

    monkeypatch.setattr(retrieval, "answer", stop)
    assert CliRunner().invoke(main, command).exit_code != 0
    assert asked == ["student", "student", "teacher"]  # a batch for each kind
    result = run_main("eval", *command, "--assert", "retrieval.student.passkey.overall.rank.mean<=10")
    assert asked[3:] == ["teacher", "teacher"]
    assert "passkey, generated right" in result.stdout
    block = json.loads(out.read_text())["suites"]["retrieval"]
    assert block["student"]["multikey"]["lengths"] == [360]
    assert block["student"]["multikey"]["depths"] == [0.0, 1.0]
    assert np.array(block["teacher"]["passkey"]["accuracy"]).shape == (1, 2)
