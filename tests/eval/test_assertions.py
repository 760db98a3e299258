"""The comparisons of --assert, and its refusals."""

import re
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.eval.assertions import ALIASES, Unmet, check, check_models, parse
from kvfold.eval.cli import main
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites.catalogue import DEFAULT
from kvfold.texts.corpus import Text

from .conftest import Make

PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"
REPORT = {
    "schema": 2,
    "device": "cpu",
    "teacher": None,
    "suites": {
        "ppl": {
            "student": {"dtype": "float32", "perplexity": 2.5, "window_nll": [1, 2.5]},
            "teacher": None,
            "parent": None,
            "ratio": None,
        }
    },
}


@pytest.mark.parametrize("text", [
    "ppl.student.window_nll.1<3", "ppl.student.perplexity<=2.5", "suites.ppl.student.perplexity>2",
    "ppl.student.window_nll.0 >= 1", "ppl.student.perplexity==2.5", "schema == 2",
])  # fmt: skip
def test_what_holds_is_silent(text: str) -> None:
    check([parse(text, DEFAULT)], REPORT)


@pytest.mark.parametrize(("text", "shown"), [
    ("ppl.student.perplexity<2.5", "it is 2.5"),
    ("ppl.student.window_nll.1>1e9", "it is 2.5"),
    ("ppl.student.window_nll.0==2", "it is 1"),
    ("ppl.ratio.mean<1", "it is undefined"),
    ("ppl.teacher.perplexity<2", "it is undefined"),
])  # fmt: skip
def test_what_does_not_hold_says_what_it_is(text: str, shown: str) -> None:
    with pytest.raises(Unmet, match=shown) as raised:
        check([parse("schema==2", DEFAULT), parse(text, DEFAULT)], REPORT)
    assert raised.value.exit_code == 3
    assert "schema" not in raised.value.message


@pytest.mark.parametrize(("text", "sentence"), [
    ("ppl.row.1<2", "suites.ppl has no row; it has student, teacher, parent"),
    ("ppl.student.window_nll.7<2", "suites.ppl.student.window_nll has no 7; it has nothing"),
    ("fidelty.kl.mean<2", "the report has no fidelty; did you mean 'kl.mean'"),
    ("klm<1", "the report has no klm; did you mean 'kl'"),
    ("nothing.x<2", "the report has no nothing; known: ppl, fidelity, cache, kl"),
    ("ppl.student<2", "suites.ppl.student is not a number; it has dtype, perplexity"),
    ("suites.ppl<2", "suites.ppl is not a number; it has student, teacher, parent"),
    ("device==2", "device is not a number"),
    ("ppl.student.dtype==1", "suites.ppl.student.dtype is not a number"),
])  # fmt: skip
def test_a_path_that_leads_nowhere_says_what_there_is(text: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        check([parse(text, DEFAULT)], REPORT)


@pytest.mark.parametrize(
    "text",
    ["", "kl", "kl<", "<1", "kl<nan", "kl<inf", "kl<1e400", "kl=1", "kl<1<2", "kl!=1", "k l<1", "kl<1 nats"],
)
def test_what_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not a comparison with a number; write for example"):
        parse(text, DEFAULT)


@pytest.mark.parametrize(
    "text", ["kl.p99<0", "fidelity.kl_percentiles.p99_9<0", "ppl.student.word_perplexity<1"]
)
def test_a_bound_outside_the_range_of_a_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"can never hold: .* is at least"):
        parse(text, DEFAULT)


@pytest.mark.parametrize("text", [
    "tasks.tasks.wikitext.metrics.word_perplexity.difference.mean<0.5",
    "tasks.tasks.kl.metrics.acc.difference.mean<-0.1",
    "tasks.tasks.a.metrics.ratio.student.mean<-1",
    "ppl.difference.mean<-0.1",
])  # fmt: skip
def test_a_number_has_no_range_by_the_names_above_it(text: str) -> None:
    found = parse(text, (*DEFAULT, "tasks"))
    assert text == f"{'.'.join(found.path[1:])}<{found.bound:g}"


def test_every_alias_leads_to_a_number(make: Make, text: Text) -> None:
    teacher, parent, student = make(initializer_range=0.02), make(), make(seed=1)
    options = Options(device="cpu", window=32, cache_dtype="int8")
    report = evaluate(student, teacher, text, options, parent).to_json()
    check([parse(f"{alias}>-1e9", (*DEFAULT, "storage")) for alias in ALIASES], report)


def test_paths_that_jq_is_shown_are_those_of_the_report(make: Make, text: Text) -> None:
    shown = re.findall(r"\bjq (\.[\w.]+)", (PAGE.read_text(encoding="utf-8") + str(main.epilog)))
    assert len(shown) == 2
    report = evaluate(make(), make(seed=1), text, Options(device="cpu", window=32)).to_json()
    for path in shown:
        assert isinstance(reduce(getitem, path.removeprefix(".").split("."), report), float)


@pytest.mark.parametrize("text", ["recovered>0.5", "ppl.parent.perplexity<9"])
def test_what_needs_another_model_is_refused_without_it(text: str) -> None:
    wanted = parse(text, DEFAULT)
    for held in ("kl<1", "top1>0", "ppl<9", "ppl.ratio<2", "cache.ratio<1"):
        check_models([parse(held, DEFAULT)], {"parent": "none"})
    with pytest.raises(InvalidInput, match="can never hold: none"):
        check_models([wanted], {"parent": "none"})
    for compared in ("kl<1", "kl.max<1", "top1>0", "ppl.ratio<2", "nll.difference<1"):
        with pytest.raises(InvalidInput, match="can never hold: none"):
            check_models([parse(compared, DEFAULT)], {"teacher": "none"})
