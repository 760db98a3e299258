"""Tasks of our own, from local files: the numbers are the harness's, and pairs are paired right."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvfold.eval.estimate import proportion, proportion_difference
from kvfold.eval.run import evaluate
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.eval.suites.tasks import flips, rows
from kvfold.texts.corpus import read_text
from kvfold.texts.wikitext import articles

from ...support.task_runs import CPU, ROWS, run_tasks

lm_eval: ModuleType = pytest.importorskip("lm_eval", reason="pip install 'kvfold[eval]' for the suite tasks")


def right(directory: Path, file: Path) -> tuple[list[float], list[float]]:
    """For each document 1 if its right choice is the likeliest, also per byte, by whole forward passes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    plain, by_length = [], []
    for line in file.read_text().splitlines():
        document = json.loads(line)
        scores = []
        for choice in document["choices"]:
            context = tokenizer(document["question"]).input_ids
            ids = context + tokenizer(" " + choice).input_ids
            with torch.inference_mode():
                logits_TV = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            scores.append(sum(float(logits_TV[at - 1, ids[at]]) for at in range(len(context), len(ids))))
        plain.append(float(np.argmax(scores) == document["gold"]))
        lengths = [len(choice) for choice in document["choices"]]
        by_length.append(float(np.argmax(np.divide(scores, lengths)) == document["gold"]))
    return plain, by_length


def test_accuracies_are_of_whole_forwards_paired_by_document(mha: Path, other: Path, own_tasks: Path) -> None:
    found = run_tasks(mha, other, own_tasks, "kv_one").tasks["kv_one"]
    (ours, ours_norm), (theirs, theirs_norm) = (
        right(model, own_tasks / "kv_one.json") for model in (mha, other)
    )
    assert (found.samples, found.shots, found.primary) == (24, 0, "acc")
    assert ours != theirs
    for name, left, across in (("acc", ours, theirs), ("acc_norm", ours_norm, theirs_norm)):
        metric = found.metrics[name]
        assert metric.student.mean == pytest.approx(np.mean(left))
        assert metric.student == proportion(left)
        assert metric.teacher.mean == pytest.approx(np.mean(across))
        assert metric.difference is not None
        assert metric.difference == proportion_difference(left, across)
        assert metric.flips.right_to_wrong == sum(a > b for a, b in zip(across, left, strict=True))
        assert metric.flips.wrong_to_right == sum(b > a for a, b in zip(across, left, strict=True))


def test_word_perplexity_of_the_harness_is_our_protocols(mha: Path, own_tasks: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"text": ROWS}))
    (own_tasks / "pages.json").write_text(
        "\n".join(json.dumps({"page": article}) for article in articles(ROWS))
    )
    result = evaluate(
        mha,
        None,
        read_text("lm-eval:wikitext", rows),
        CPU,
        suites=("ppl", "tasks"),
        settings=SuiteSettings.read({"tasks": "pages", "task_path": own_tasks}),
    )
    theirs = result.suites["tasks"].tasks["pages"].metrics
    ours = result.ppl.student
    assert theirs["word_perplexity"].student.mean == pytest.approx(ours.word_perplexity, rel=1e-5)
    assert theirs["byte_perplexity"].student.mean == pytest.approx(ours.byte_perplexity, rel=1e-5)
    assert theirs["bits_per_byte"].student.mean == pytest.approx(ours.bits_per_byte, rel=1e-5)
    assert theirs["word_perplexity"].flips is None
    assert theirs["word_perplexity"].student.standard_error is None


def test_a_group_is_all_its_documents_as_in_the_harness(mha: Path, other: Path, own_tasks: Path) -> None:
    found = run_tasks(mha, other, own_tasks, "kv_both,kv_one,kv_two")
    one, two, both = (found.tasks[name].metrics["acc"] for name in ("kv_one", "kv_two", "kv_both"))
    assert found.tasks["kv_both"].samples == 29
    assert both.student.mean == pytest.approx((24 * one.student.mean + 5 * two.student.mean) / 29)
    assert both.flips.right_to_wrong == one.flips.right_to_wrong + two.flips.right_to_wrong
    primary = [task.metrics[task.primary] for task in found.tasks.values()]
    assert found.average.student == pytest.approx(np.mean([metric.student.mean for metric in primary]))
    errors = [metric.difference.standard_error for metric in primary if metric.difference]
    assert found.average.difference.standard_error == pytest.approx(
        math.sqrt(sum(error**2 for error in errors if error)) / 3
    )
    loaded = lm_eval.models.huggingface.HFLM(
        pretrained=model_of(mha), tokenizer=tokenizer_of(mha), max_length=64
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(own_tasks))
    theirs = lm_eval.simple_evaluate(model=loaded, tasks=["kv_both"], task_manager=manager, bootstrap_iters=0)
    assert theirs["results"]["kv_both"]["acc,none"] == pytest.approx(both.student.mean)


def model_of(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def tokenizer_of(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_mcnemar_is_the_exact_binomial_test() -> None:
    student = [1, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    teacher = [1, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    found = flips(student, teacher)
    assert (found.right_to_wrong, found.wrong_to_right) == (6, 1)
    assert found.p_value == pytest.approx(2 * (1 + 7) / 2**7)  # both tails of seven fair coins
    assert flips([1, 0], [1, 0]).p_value == 1


def test_a_limit_reads_the_first_documents_and_examples_are_asked_for(mha: Path, own_tasks: Path) -> None:
    found = run_tasks(mha, None, own_tasks, "kv_one", limit=4)
    assert (found.limit, found.tasks["kv_one"].samples) == (4, 4)
    assert found.tasks["kv_one"].metrics["acc"].student.mean == np.mean(
        right(mha, own_tasks / "kv_one.json")[0][:4]
    )
    assert "kv_one, acc, 0-shot, only the first 4" in [row[0] for row in rows(found, ("student",))]
    assert run_tasks(mha, None, own_tasks, "kv_one", fewshot=1).tasks["kv_one"].shots == 1
