"""`kvfold plan`: what fits, what it costs, and whether predicted losses rank as measured ones."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

import kvfold
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.write.rewrite import rewrite
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.lab.reference import costs
from kvfold.planning import demand as costs_of
from kvfold.planning.candidates import Candidate, find_candidates
from kvfold.planning.demand import Bounds
from kvfold.planning.ranking import place, predict_rows, rank
from kvfold.texts.corpus import read_text

from ..support.commands import run_main
from ..support.tiny import ROPE, make

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
FEW = ("--context", "256", "--budgets", "50%,12.5%")


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of the demo checkpoint on text of its own."""
    file = tmp_path_factory.mktemp("statistics") / "demo.safetensors"
    study(open_source(DEMO), "self", sequences=12, length=128, seed=0, save=file)
    return file


def run(*arguments: str, code: int | None = None) -> Result:
    return run_main("plan", *arguments, code=code)


def report(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json", code=code)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def find(*shares: str, source: Path = DEMO) -> dict[str, Candidate]:
    return {one.label: one for one in find_candidates(open_source(source), shares or ("25%",))[0]}


def test_memory_is_weights_cache_and_activations() -> None:
    for one in find("25%").values():
        row = place(one, Bounds(context=200, batch=3, memory=None))
        assert row.demand.weights == sum(spec.nbytes for spec in one.plan.specs.values())
        assert row.demand.cache == 3 * 200 * one.plan.cache()["after"]["bytes_per_token"]
        assert row.demand.total == row.demand.weights + row.demand.cache + row.demand.activations
        read = row.decoding.bytes - row.demand.cache // 3
        # The demo's head is its embeddings.
        assert read == row.demand.weights // 3 or row.decoding.form == "expanded"


def test_a_sliding_window_bounds_the_cache(tmp_path: Path) -> None:
    source = make(tmp_path / "windows", "ministral")  # a layer with a window of 9, one without
    one = find(source=source)["GQA-2"]
    each = one.plan.cache()["after"]["bytes_per_token"] // 2
    demands = [costs_of.demand(one.plan, Bounds(context=n, batch=5)) for n in (8, 100)]
    assert [needed.cache for needed in demands] == [5 * each * 16, 5 * each * 109]


def test_rebuilt_keys_cost_memory_bytes_and_arithmetic() -> None:
    stock, intact = find("25%")["MLA 48+16, stock uniform"], find("25%")["MLA 64, rope intact"]
    bounds, engines = Bounds(context=250, batch=4), ("transformers", "sglang")
    assert costs_of.rebuilt(stock.plan, ("transformers",)) > costs_of.rebuilt(stock.plan, engines) == 0
    expanded, absorbed = (costs_of.decoding(stock.plan, bounds, each) for each in (engines[:1], engines))
    assert (expanded.form, absorbed.form) == ("expanded", "absorbed")
    # 8 heads of 16, each with un-rotated and rotary key and value, written and read, 6 layers, bfloat16.
    assert expanded.bytes - absorbed.bytes == 250 * 6 * 8 * (16 + 16 + 16) * 2 * 2
    assert expanded.attention_flops > 2 * absorbed.attention_flops
    assert costs_of.decoding(intact.plan, bounds).form == "expanded"
    rebuilt = (
        costs_of.demand(intact.plan, bounds).activations
        - costs_of.demand(stock.plan, bounds, engines).activations
    )
    assert rebuilt == 4 * 250 * 256 * 2


def test_by_weights_alone_the_slots_that_statistics_will_choose_come_first() -> None:
    found = find("25%")
    plain, uniform = found["MLA 48+16, stock"], found["MLA 48+16, stock uniform"]
    assert plain.plan.config["rope_parameters"] == uniform.plan.config["rope_parameters"], "until then"
    assert (plain.allocates, uniform.allocates) == (True, False)
    assert (plain.served_by, uniform.served_by) == (("transformers",), ("transformers", "sglang"))
    assert "--slots" not in plain.request.command, "kvfold convert is free to choose them"
    bounds = Bounds(context=256, batch=1, memory=None)
    rows = predict_rows([place(one, bounds) for one in (uniform, plain)], bounds, None)
    assert rows[0].loss == rows[1].loss
    assert rank(rows, "quality", 0.1, calibrated=False)[0][0].candidate is plain


def test_what_runs_more_widely_at_the_same_loss_is_named() -> None:
    tight = (str(DEMO), "--context", "256", "--batch", "16", "--memory", "8MB", "--budgets", "25%")
    chosen = report(*tight)["chosen"]
    other = chosen["alternative"]
    assert (chosen["label"], other["label"]) == ("MLA 48+16, remote", "MLA 48+16, stock uniform")
    said = "the same cache and predicted loss in transformers, sglang, without trust"
    assert other["reason"].startswith(said)
    assert "--container stock --slots uniform" in other["command"]
    assert run(*tight).stdout.splitlines()[-1] == other["command"]
    assert report(*tight, "--speed", "--tolerance", "1")["chosen"]["alternative"] is None, "MQA needs none"


def test_formulas_count_the_weights_that_are_written() -> None:
    for one in find("25%").values():
        written = [spec.shape for name, spec in one.plan.layers[0].writes.items() if "norm" not in name]
        assert costs_of._costs(one.plan, is_absorbed=False).total == sum(map(math.prod, written)), one.label
    intact = costs.intact(128, 8, 8, 16, 64)
    assert intact.cache == 64
    assert intact.decode(10) - intact.decode(9) == 4 * 128 + 2 * 64 * 256


def test_ranking_agrees_with_measured_perplexity(tmp_path: Path, statistics: Path) -> None:
    """Spearman's correlation of predicted and measured losses of closed forms, over all targets together."""
    source, bounds = open_source(DEMO), Bounds(context=256, batch=1, memory=None)
    candidates, _ = find_candidates(source, ("50%", "25%", "12.5%"))
    wanted = [one for one in candidates if one.request.slots is None and one.request.container != "remote"]
    rows = predict_rows([place(one, bounds) for one in wanted], bounds, Statistics.load(statistics))
    assert {row.candidate.kind for row in rows} == {"gqa", "mla decoupled", "mla intact"}
    assert len(rows) >= 8
    measured, text = [], read_text("stdlib")
    cache = tmp_path / "teacher"
    options = Options(window=256, max_windows=4, trust_remote_code=True, teacher_cache=cache)
    for number, row in enumerate(rows):
        rewrite(replace(row.candidate.plan, refine=0), tmp_path / str(number))
        lost = evaluate(tmp_path / str(number), DEMO, text, options, suites=("ppl",)).ppl.difference
        measured.append(lost.mean)
    predicted = [row.loss for row in rows]
    assert spearman(predicted, measured) >= 0.9, (predicted, measured)


def spearman(one: list[Any], other: list[Any]) -> float:
    ranks = torch.tensor([one, other]).argsort(1).argsort(1).double()
    return float(torch.corrcoef(ranks)[0, 1])


def test_what_is_chosen_fits_and_can_be_pasted(tmp_path: Path, statistics: Path) -> None:
    found = report(str(DEMO), *FEW, "--batch", "16", "--memory", "5.5MB", "--calibration", str(statistics))
    fitting = [row for row in found["candidates"] if row["fits"]]
    assert 0 < len(fitting) < len(found["candidates"])
    assert all(row["fits"] == (row["memory"]["total"] <= 5.5e6) for row in found["candidates"])
    losses = [row["predicted_loss"] for row in fitting]
    assert losses == sorted(losses)
    assert found["chosen"]["label"] == fitting[0]["label"]
    assert found["unit"] == "nats per token, before refinement"
    words = shlex.split(found["chosen"]["command"])
    assert words[0] == "kvfold"
    done = run_main(*words[1:], "--refine", "0", "--out", tmp_path / "out", "--json")
    record = json.loads(done.stdout)
    elements = "elements_per_token_per_layer"
    assert record["cache"]["after"][elements] == fitting[0]["cache"][elements]
    assert record["predicted_loss"] == pytest.approx(fitting[0]["predicted_loss"], rel=1e-6)


def test_speed_takes_what_moves_least_within_the_tolerance() -> None:
    arguments = (str(DEMO), "--context", "256", "--budgets", "25%", "--speed", "--tolerance")
    rows = report(*arguments, "0.3")["candidates"]
    within = [row for row in rows if row["predicted_loss"] <= 0.3]
    assert 0 < len(within) < len(rows)
    assert rows[: len(within)] == within
    assert rows[0]["decode"]["bytes"] == min(row["decode"]["bytes"] for row in within)
    assert rows[0]["predicted_loss"] > min(row["predicted_loss"] for row in within)
    strict = report(*arguments, "0")
    assert strict["candidates"][0]["predicted_loss"] == min(row["predicted_loss"] for row in rows)
    assert "none of the 7 that fit is within the tolerance of 0" in strict["chosen"]["reason"]


def test_by_weights_alone_it_says_so() -> None:
    result = run(str(DEMO), *FEW, code=0)
    assert "by weights alone" in result.stdout
    assert "the weights alone; --calibration self" in result.stderr
    assert "\nkvfold convert " in result.stdout
    assert "--calibration" not in result.stdout.splitlines()[-1]
    rows = report(str(DEMO), *FEW)["candidates"]
    loss = {row["label"]: row["predicted_loss"] for row in rows}
    assert loss["GQA-4"] < loss["GQA-2"] < loss["MQA"]
    assert loss["MLA 128, rope intact"] < 1e-9  # as wide as the stream
    whole = report(str(DEMO), "--context", "64", "--budgets", "75%,50%,60%")["chosen"]
    assert "--kv-budget 50%" in whole["command"]  # more would keep nothing more


def test_the_table_shows_what_fits_unless_all_is_asked_for() -> None:
    tight = (str(DEMO), "--context", "256", "--batch", "16", "--memory", "8MB", "--budgets", "25%")
    fits = [row["fits"] for row in report(*tight)["candidates"]]
    count, left = len(fits), fits.count(False)
    assert 0 < left < count
    shown, every = run(*tight), run(*tight, "--all")
    assert shown.stdout.count(" yes │") == every.stdout.count(" yes │") == count - left
    assert shown.stdout.count(" no │") == 1, "the source"
    assert every.stdout.count(" no │") == 1 + left
    assert f"left out ({left} of {count}); --all lists them" in shown.stderr
    assert "--all" not in every.stderr
    assert f"in 8 MB: {count - left} of {count} targets fit" in shown.stdout


def test_where_nothing_fits_it_says_what_would() -> None:
    few = (str(DEMO), "--budgets", "50%,12.5%")
    tight = (*few, "--context", "256", "--batch", "16", "--memory", "4MB")
    would = report(*tight, code=3)["would_fit"]
    assert report(*tight, code=3)["chosen"] is None
    lines = run(*tight).stdout.splitlines()
    assert lines[-1].startswith("Nothing fits. What would: --memory ")
    for name in ("memory", "batch", "context"):
        option, size = f"--{name}", would[name]
        assert report(*tight, option, str(size))["chosen"], option
        beyond = size - 1 if option == "--memory" else size + 1
        assert report(*tight, option, str(beyond), code=3)["chosen"] is None
    never = report(*few, "--memory", "1MB", code=3)["would_fit"]
    assert never["batch"] is never["context"] is None


def test_an_engine_leaves_what_it_runs() -> None:
    found = report(str(DEMO), *FEW, "--engine", "vllm")
    assert [row["label"] for row in found["candidates"]] == ["GQA-4", "GQA-2", "MQA"]
    assert all(row["engines"] == {"vllm": ""} for row in found["candidates"])
    assert "--engine vllm" in found["chosen"]["command"]
    assert found["refused"]["mla intact"]


def test_a_wide_source_is_offered_what_engines_have_kernels_for(tmp_path: Path) -> None:
    source = make(tmp_path / "wide", hidden_size=128, head_dim=64)  # caches 1024
    rows = report(str(source), "--context", "64", "--budgets", "50%")["candidates"]
    row = {row["label"]: row for row in rows}["MLA 512+64, serving"]
    assert row["engines"]["vllm"] == row["engines"]["sglang"] == ""
    assert row["decode"]["form"] == "absorbed"


def test_where_no_loss_can_be_predicted_the_largest_cache_is_taken(tmp_path: Path) -> None:
    # Its queries grow with their position, from the ninth on: that is not among what kvfold computes.
    rope = {**ROPE["yarn"], "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}
    source = make(tmp_path / "growing", "ministral3", rope_parameters=rope)
    sample = ("--calibration", "self", "--sequences", "4", "--length", "32")
    found = report(str(source), *sample, "--context", "64", "--budgets", "50%,25%")
    assert {row["predicted_loss"] for row in found["candidates"]} == {None}
    shares = [row["cache"]["share"] for row in found["candidates"]]
    assert shares == sorted(shares, reverse=True)
    assert "no loss can be predicted" in found["chosen"]["reason"]


@pytest.mark.parametrize("calibration", ["none", "self"])
@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma2", "gpt_oss"])
def test_losses_are_predicted_through_windows(tmp_path: Path, family: str, calibration: str) -> None:
    source = make(tmp_path / "source", family, num_key_value_heads=4)
    sample = ("--calibration", calibration, "--sequences", "8", "--length", "24")
    rows = report(str(source), *sample, "--context", "64", "--budgets", "50%,25%")["candidates"]
    losses = {row["label"]: row["predicted_loss"] for row in rows}
    assert {"GQA-2", "MQA"} < set(losses)
    assert 0 < losses["GQA-2"] < losses["MQA"]
    # Key norms go into the class that engines serve by statistics only.
    unknown = {label for label, loss in losses.items() if loss is None}
    assert not any(name in label for label in unknown for name in ("GQA", "MQA", "intact"))
    assert not unknown or calibration == "none"
    assert all(loss is None or math.isfinite(loss) for loss in losses.values())


def test_curve_and_picture(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    picture, statistics = tmp_path / "curve.png", tmp_path_factory.mktemp("few") / "demo.safetensors"
    study(open_source(DEMO), "self", sequences=4, length=32, seed=0, save=statistics)
    arguments = (str(DEMO), "--budgets", "25%,12.5%", "--calibration", str(statistics))
    arguments += ("--curve", "--png", str(picture))
    found = report(*arguments, "--memory", "1MB", code=3)  # a curve needs nothing to fit
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in found["curve"]:
        lines.setdefault(point["line"], []).append(point)
    counts = {line: len(points) for line, points in lines.items()}
    assert counts == {"gqa": 3, "mla decoupled": 2, "mla intact": 2}
    for points in lines.values():
        assert [p["share"] for p in points] == sorted((p["share"] for p in points), reverse=True)
        assert [p["loss"] for p in points] == sorted(p["loss"] for p in points)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    assert "exists, and nothing is overwritten" in run(*arguments, code=2).stderr


def test_statistics_are_saved_also_where_nothing_fits(tmp_path: Path) -> None:
    """The commands of the table name the file."""
    kept = tmp_path / "kept.safetensors"
    small = ("--budgets", "50%", "--memory", "1kB", "--sequences", "1", "--length", "16")
    result = run(str(DEMO), *small, "--save-statistics", str(kept))
    assert kept.is_file(), result.output


def test_saved_statistics_are_of_the_sources_text_where_none_is_named(tmp_path: Path) -> None:
    kept, few = tmp_path / "kept.safetensors", {"sequences": 1, "length": 16}
    found = kvfold.plan(DEMO, context=64, budgets="50%", memory="1kB", save_statistics=kept, **few)
    assert found.report["calibration"] == {"text": "self", "tokens": 16}


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("--context", "long"), "--context is 'long'; it should be a number of tokens"),
    (("--memory", "24 parsecs"), "--memory is '24 parsecs'; it should be a size"),
    (("--memory", "0GB"), "--memory is '0GB'; it should be a size"),
    (("--memory", "24"), "--memory is '24'; it counts bytes: write for example 24GB"),
    (("--budgets", "50%,150%"), "--budgets 150% is not a share"),
    (("--engine", "mlc"), "--engine is 'mlc'; it should be 'transformers', "),
    (("--png", "curve.svg"), "does not end in .png"),
    (("--png", "nowhere/curve.png"), "there is no directory"),
    (("--calibration", "absent.safetensors"), "absent.safetensors"),
    (("--calibration", "absent.txt", "--memory", "1kB"), "--calibration absent.txt is not none, self"),
    (("--calibration", "none", "--save-statistics", "kept.safetensors"), "nothing to save"),
])  # fmt: skip
def test_mistakes_are_sentences(arguments: tuple[str, ...], sentence: str) -> None:
    given = arguments if "--budgets" in arguments else ("--budgets", "50%", *arguments)
    result = run(str(DEMO), *given, code=2)
    assert sentence in result.stderr
    assert "Traceback" not in result.output


def test_the_context_is_at_most_the_positions_where_none_is_named() -> None:
    """A command without --context said that --context 32768 exceeds the positions."""
    found = run(str(DEMO), "--budgets", "50%")
    positions = open_source(DEMO).positions
    assert found.exit_code == 0, found.output
    assert f"at {positions:,} tokens x 1" in found.stdout.replace("\n", " ")
    assert "exceeds" not in found.stderr
    assert "--context 32768 exceeds the source's max_position_embeddings" in run(
        str(DEMO), "--budgets", "50%", "--context", "32k"
    ).stderr.replace("\n", " ")
