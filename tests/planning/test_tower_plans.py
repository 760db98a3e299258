"""`kvfold plan` and `kvfold convert --dry-run` of multimodal checkpoints: the tower is planned in its place."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

import kvfold
from kvfold.checkpoints import directory
from kvfold.checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from kvfold.cli import main
from kvfold.convert.towers.tower import find_tower, write_tower
from kvfold.core.errors import InvalidInput
from kvfold.core.work import WorkDir

from ..support.commands import run_main
from ..support.quantised import quantise, quantised_tower
from ..support.tokenizers import save_tokenizer
from ..support.towers import TOWERS, make_multimodal

GQA = ("--to", "gqa", "--kv-heads", "2")
entries, logical = directory._entries, QuantisedCheckpoint._logical


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("sources")
    made = {kind: make_multimodal(place / kind, kind) for kind in TOWERS if kind != "llava"}
    made["llava"] = make_multimodal(place / "llava", "llava", vocab_size=258)
    save_tokenizer(made["llava"], bos="<s>")
    return made


def run(*words: str, code: int = 0) -> dict[str, Any]:
    result = run_main(*words, "--json", code=code)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_dry_run_says_which_disk_it_takes(
    is_alone: bool, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In addition to the output: what is there before the working directories go, and what stays."""
    words = ("convert", str(sources["llava"]), *GQA, "--calibration", "none", *(["--text-only"] * is_alone))
    work = run(*words, "--dry-run")["tower"]["work_bytes"]
    shown = CliRunner().invoke(main, [*words, "--dry-run"], terminal_width=300).stdout
    assert ("disk while it runs" in shown) != is_alone
    assert ("stays in OUT.tower" in " ".join(shown.split())) == is_alone
    there: list[int] = []

    def count(*_: Any, **__: Any) -> None:
        places = ("out.tower", "out.partial/tower", "out.partial/text")
        files = (tmp_path / name / "model.safetensors" for name in places)
        there.append(
            sum(tensor.nbytes for file in files if file.exists() for tensor in load_file(file).values())
        )

    finish = WorkDir.finish
    monkeypatch.setattr(WorkDir, "finish", lambda *given: (count(), finish(*given))[1])
    kvfold.fold(
        sources["llava"], kvfold.GQA(kv_heads=2), out=tmp_path / "out", calibration="none", verify="none",
        text_only=is_alone,
    )  # fmt: skip
    count()
    assert max(there) == work


@pytest.mark.parametrize("kind", TOWERS)
def test_a_dry_run_says_what_the_fold_writes(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Its class, tensors, bytes and cache; and nothing is written."""
    source = sources[kind]
    before = sorted(source.iterdir())
    planned = run("convert", str(source), *GQA, "--dry-run", "--calibration", "none")
    assert sorted(source.iterdir()) == before
    out = tmp_path / "out"
    folded = kvfold.fold(source, kvfold.GQA(kv_heads=2), out=out, calibration="none", verify="none")
    written = load_file(out / "model.safetensors")
    assert planned["source"] == str(source)
    assert planned["container"] == folded.record["container"]
    assert planned["output_bytes"] == sum(tensor.nbytes for tensor in written.values())
    assert planned["cache"] == folded.cache
    for name, shape in planned["attention_of_layer_0"].items():
        assert list(written[name].shape) == shape
    tower = planned["tower"]
    assert tower["in_place"] is True
    assert tower["bytes"] + tower["other_bytes"] == sum(
        tensor.nbytes for tensor in load_file(source / "model.safetensors").values()
    )
    assert tower["targets_in_place"]["gqa"] == tower["targets_in_place"]["mqa"] == ""
    assert (tower["targets_in_place"]["mla"] == "") == (kind in {"llava", "mistral3"})
    assert (tower["targets_alone"]["mla"] == "") == (kind not in {"llama4", "gemma4"})
    assert planned["fold"]["seconds"] > 0
    assert planned["fold"]["peak_bytes"] > 0


def test_a_dry_run_refuses_what_the_fold_refuses(sources: dict[str, Path]) -> None:
    mla = ("--to", "mla", "--kv-budget", "50%", "--dry-run")
    result = run_main("convert", sources["qwen2_5_vl"], *mla, code=2)
    assert "builds its own text model, in which latent attention has no place" in result.stderr
    assert "--text-only" in result.stderr
    alone = run("convert", str(sources["qwen2_5_vl"]), *mla, "--text-only")
    assert alone["tower"]["in_place"] is False
    assert alone["container"] == "DeepseekV3ForCausalLM"
    inside = run("convert", str(sources["llava"]), *mla)
    assert inside["container"] == "LlavaForConditionalGeneration"
    assert "language_model.model.layers.0.self_attn.kv_b_proj.weight" in inside["attention_of_layer_0"]


def test_a_dry_run_shows_the_tower_in_words(sources: dict[str, Path]) -> None:
    result = CliRunner().invoke(main, ["convert", str(sources["qwen2_5_vl"]), *GQA, "--dry-run"])
    words = " ".join(result.stdout.split())
    assert "GQA, MQA; MLA of the tower alone, with --text-only" in words
    assert "of other tensors keep their bytes" in words
    assert "kvfold-tower-" not in result.output


def test_statistics_are_taken_on_the_tower(sources: dict[str, Path], tmp_path: Path) -> None:
    """They are those of the tower that `--text-only` writes, and can be saved; errors name the source."""
    tower = find_tower(sources["llava"])
    assert tower is not None
    write_tower(tower, tmp_path / "tower", 10**9)
    few = ("--calibration", "self", "--sequences", "2", "--length", "16")
    planned = [
        run("convert", str(place), *GQA, "--dry-run", *few)
        for place in (sources["llava"], tmp_path / "tower")
    ]
    assert planned[0]["calibration"] == planned[1]["calibration"]
    assert planned[0]["calibration"] is not None
    saved = tmp_path / "statistics.safetensors"
    run("plan", str(sources["llava"]), *few, "--save-statistics", str(saved))
    again = run("plan", str(sources["llava"]), "--calibration", str(saved))
    assert again["unit"] == "nats per token, before refinement"
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time. " * 40)
    # Its tokenizer is none.
    result = run_main("plan", sources["mistral3"], "--calibration", text, code=2)
    assert str(sources["mistral3"]) in result.stderr
    assert "kvfold-tower-" not in result.output


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_targets_in_place_are_compared(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Each row's command writes what the row says; what has no place is named with the way that there is."""
    source = sources[kind]
    found = kvfold.plan(source, context=512, memory="1GB")
    assert found.report["source"] == str(source)
    labels = [row["label"] for row in found]
    assert {"GQA-2", "MQA"} <= set(labels)
    architecture = {
        "llava": "LlavaForConditionalGeneration",
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    }
    assert {row["class"] for row in found} == {architecture[kind]}
    for row in found:
        run_by = ["transformers"] if row["label"].startswith("MLA") else ["transformers", "vllm"]
        assert [name for name, why in row["engines"].items() if not why] == run_by
    assert any(label.startswith("MLA") for label in labels) == (kind == "llava")
    refused = found.report["refused"]
    assert ("in which latent attention has no place" in refused.get("mla decoupled", "")) == (kind != "llava")
    assert "--text-only" in refused["mla intact"]
    row = found.rows[0]
    run_main(*row["command"].split()[1:], "--calibration", "none", "--out", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in written.values()) == row["memory"]["weights"]
    assert sum(tensor.numel() for tensor in written.values()) == row["parameters"]


@pytest.mark.parametrize("form", [None, "gptq"])
def test_the_checkpoint_is_opened_once_for_all_targets(
    form: str | None, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers of its weight files are read once, and its quantised tensors found once, also in the tower."""
    source = sources["llava"]
    if form is not None:
        source = quantise(source, tmp_path / "quantised", quantised_tower(form))
    opened: list[Path] = []
    found: list[Path] = []
    monkeypatch.setattr(
        directory, "_entries", lambda place, *rest: opened.append(place) or entries(place, *rest)
    )
    monkeypatch.setattr(
        QuantisedCheckpoint, "_logical", lambda whole: found.append(whole.directory) or logical(whole)
    )
    assert len(kvfold.plan(source, context=512)) > 1
    assert opened == [source]
    assert found.count(source) == (form is not None)
    assert len(found) <= 2
    opened.clear()
    run("convert", str(source), *GQA, "--dry-run", "--calibration", "none")
    assert opened == [source]


def test_the_tower_alone_is_planned_as_a_text_model(sources: dict[str, Path], tmp_path: Path) -> None:
    tower = find_tower(sources["qwen2_5_vl"])
    assert tower is not None
    write_tower(tower, tmp_path / "tower", 10**9)
    alone = run("plan", str(sources["qwen2_5_vl"]), "--text-only", "--context", "512")
    as_text = run("plan", str(tmp_path / "tower"), "--context", "512")
    assert [row["label"] for row in alone["candidates"]] == [row["label"] for row in as_text["candidates"]]
    losses = ([row["predicted_loss"] for row in each["candidates"]] for each in (alone, as_text))
    assert next(losses) == next(losses)
    assert all("--text-only" in row["command"] for row in alone["candidates"])
    with pytest.raises(InvalidInput, match="is not a multimodal model"):
        kvfold.plan(tmp_path / "tower", text_only=True)
    with pytest.raises(InvalidInput, match="it is not known"):
        kvfold.plan(sources["llava"], engines=["sglang"])
    inside = kvfold.plan(sources["llava"], engines=["vllm"])
    assert {row["label"] for row in inside} == {"GQA-2", "MQA"}
    with pytest.raises(InvalidInput, match=r"its class is Llama4ForConditionalGeneration; its folds .* run"):
        kvfold.plan(sources["llama4"], engines=["vllm"])


def test_what_would_fit_counts_the_tensors_around_the_tower(sources: dict[str, Path]) -> None:
    asked = ("plan", str(sources["llava"]), "--budgets", "50%")
    totals = [row["memory"]["total"] for row in run(*asked, "--context", "512")["candidates"]]
    tight = (*asked, "--memory", str(min(totals) - 1))
    would = run(*tight, "--context", "512", code=3)["would_fit"]
    assert run(*tight, "--context", str(would["context"]))["chosen"]
    run(*tight, "--context", str(would["context"] + 1), code=3)
