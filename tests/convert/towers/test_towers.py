"""Multimodal checkpoints: the text tower is folded in its place, or written alone."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click import ClickException
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import kvfold
from kvfold import MLA
from kvfold.convert.cli import main
from kvfold.convert.request import fold_request
from kvfold.convert.towers.tower import find_tower, text_config
from kvfold.core.errors import InvalidInput
from kvfold.engines.rules.engine_names import ENGINES
from kvfold.engines.rules.engine_rules import lint
from kvfold.engines.rules.output_kinds import UNKNOWN
from kvfold.eval.suites.cache import predicted
from kvfold.models.causal_lm import build_empty
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.tiny import make
from ...support.tokenizers import save_tokenizer
from ...support.towers import TOWERS, make_multimodal

# The source's heads are equal, so that only a latent that is narrower than one head loses anything.
SMALL = {"gqa": ("--to", "gqa", "--kv-heads", "1"), "mla": ("--to", "mla", "--rank", "4", "--rope-dim", "4")}


@pytest.fixture(scope="module", params=TOWERS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_multimodal(tmp_path_factory.mktemp("towers") / request.param, request.param)


def fold(source: Path, name: str, *options: str) -> Path:
    out = source.with_name(f"{source.name}-{name}")
    main([str(source), *options, "--calibration", "none", "--out", str(out)], standalone_mode=False)
    return out


def logits(directory: Path, inputs: dict[str, Any]) -> Tensor:
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        try:
            out: Tensor = model(**inputs).logits
        except AttributeError as error:
            if transformers.__version__ != "5.24.0" or "no attribute 'image_outputs'" not in str(error):
                raise
            pytest.skip("Llama4ForConditionalGeneration of transformers 5.24.0 cannot run")
    return out


def test_equal_heads_pool_losslessly_with_an_image(source: Path) -> None:
    out, inputs = fold(source, "gqa", "--to", "gqa", "--kv-heads", "2"), TOWERS[source.name][1]()
    before, after = (load_file(directory / "model.safetensors") for directory in (source, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        folded = "vision" not in name and "visual" not in name and ".self_attn." in name
        assert folded or torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    record = json.loads((out / "kvfold.json").read_text())
    assert record["source"]["path"] == str(source.resolve())
    assert record["cache"]["ratio"] == 0.5
    assert sorted(path.name for path in source.parent.glob(f"{source.name}-gqa*")) == [out.name]
    expected = logits(source, inputs)
    torch.testing.assert_close(logits(out, inputs), expected, atol=5e-6, rtol=0)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
    assert (logits(source, other) - expected).abs().max() > 1e-4, "the image changes nothing"


def test_latent_attention_in_place_where_the_class_takes_any_text_model(source: Path) -> None:
    """The stock class is exact at full rank, with an image too; other multimodal classes are refused."""
    options = ("--to", "mla", "--rank", "full")
    if source.name not in {"llava", "mistral3"}:
        words = rf"model_type {source.name} builds its own text model, in which latent attention has no place"
        if source.name in {"llama4", "gemma4"}:
            words = rf"the text tower of {source.name} cannot have latent attention, because it"
        with pytest.raises(ClickException, match=words):
            fold(source, "mla", *options)
        assert not list(source.parent.glob(f"{source.name}-mla*"))
        return
    out, inputs = fold(source, "mla", *options), TOWERS[source.name][1]()
    torch.testing.assert_close(logits(out, inputs), logits(source, inputs), atol=2e-5, rtol=0)
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["model_type"] == "deepseek_v3"
    assert config["model_type"] == source.name
    before, after = (load_file(directory / "model.safetensors") for directory in (source, out))
    for name, tensor in before.items():
        if "vision" in name or "self_attn" not in name:
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    smaller = fold(source, "small", "--to", "mla", "--rank", "8", "--rope-dim", "8")
    assert json.loads((smaller / "kvfold.json").read_text())["cache"]["ratio"] == 0.25
    assert logits(smaller, inputs).isfinite().all()


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a source with a tokenizer, and next to it its smallest folds."""
    source = make_multimodal(tmp_path_factory.mktemp("whole") / "llava", "llava", vocab_size=258)
    save_tokenizer(source, bos="<s>")
    for target, options in SMALL.items():
        fold(source, target, *options)
    return source


@pytest.mark.usefixtures("warm_probe")
def test_a_fold_is_verified_as_the_whole_class(llava: Path) -> None:
    """The run at the end of a fold is one of the output, in its class, next to the source."""
    out = llava.with_name("llava-verified")
    target = MLA(rank=4, rope_dim=4)
    folded = kvfold.fold(llava, target, out=out, calibration="none", verify="full")
    report = folded.verification
    assert not report.failures
    words = {check.name: check.detail for check in report.checks}
    assert words["loads"] == "as LlavaForConditionalGeneration, no weight is missing"
    assert words["cache size"].startswith("8 elements per token and layer in the live cache")
    assert report.measured["kl"] > 1e-6
    assert type(folded.load(device="cpu")).__name__ == "LlavaForConditionalGeneration"


def test_a_fold_that_does_not_fit_is_written(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    out = llava.with_name("llava-not-run")
    folded = kvfold.fold(llava, MLA(rank=4, rope_dim=4), out=out, calibration="none", verify="full")
    [told] = [text for text in folded.notices if text.startswith(f"{out} is written; it was not run, since")]
    assert told.endswith(f"check it later with kvfold verify {out}")
    assert folded.verification.checks == ()
    assert (out / "kvfold.json").is_file()


@pytest.mark.parametrize("target", ["gqa", "mla"])
def test_other_engines_are_not_known(llava: Path, target: str) -> None:
    """No rule was run for a multimodal class, apart from fewer heads in vLLM, on text."""
    out = llava.with_name(f"llava-{target}")
    assert lint(out, ["transformers"]) == []
    is_run = target == "gqa"
    if is_run:
        assert [finding.effect for finding in lint(out, ["vllm"])] == ["note"]
    for engine in ENGINES[2 if is_run else 1 :]:
        assert [finding.effect for finding in lint(out, [engine])] == [UNKNOWN]
    card = (out / "README.md").read_text()
    assert "AutoModelForImageTextToText.from_pretrained" in card
    assert "pipeline_tag: image-text-to-text" in card
    assert ("vllm serve . --language-model-only" in card) == is_run
    assert ("vllm serve" in card) == is_run


@pytest.mark.parametrize("target", ["gqa", "mla"])
def test_a_fold_is_evaluated_on_text(llava: Path, target: str, tmp_path: Path) -> None:
    """Next to its source, as any other fold; a text model of the same weights has the same perplexity."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + n * n % 23) for n in range(600)))
    found, alone = (
        kvfold.evaluate(model, text=text, window=64)
        for model in (
            llava.with_name(f"llava-{target}"),
            fold(llava, f"{target}-alone", *SMALL[target], "--text-only"),
        )
    )
    assert found["cache.ratio"] == {"gqa": 0.25, "mla": 0.125}[target]
    for part, elements in (("student", {"gqa": 16, "mla": 8}[target]), ("teacher", 64)):
        assert found[f"cache.{part}.predicted_elements_per_token_per_layer"] == elements
        assert found[f"cache.{part}.elements_per_token_per_layer"] == elements
    assert found["kl.mean"] == pytest.approx(alone["kl.mean"], rel=1e-4, abs=1e-9)
    assert (found["kl.mean"] > 1e-6) == (target == "mla")


def test_the_cache_by_config_json_is_that_of_the_text_model(source: Path, tmp_path: Path) -> None:
    """As of the tower alone, before and after a fold, also where text_config leaves defaults out."""
    out = fold(source, "counted", "--to", "gqa", "--kv-heads", "2")
    tower = find_tower(source)
    record = json.loads((out / "kvfold.json").read_text())
    for directory, side in ((source, "before"), (out, "after")):
        elements = record["cache"][side]["elements_per_token_per_layer"]
        assert predicted(text_config(directory)) == elements
    assert predicted(tower.config) == record["cache"]["before"]["elements_per_token_per_layer"]
    bare = tmp_path / "bare"
    bare.mkdir()
    whole = {"model_type": "mistral3", "vision_config": {}, "text_config": {"model_type": "mistral"}}
    (bare / "config.json").write_text(json.dumps(whole))
    assert predicted(text_config(bare)) == 2 * 8 * 128, "of the class's defaults"


def test_both_counts_of_heads_are_folded_as_config_json_has_them(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 have a field for the heads of layers that read all positions."""
    tied = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
    source = make_multimodal(tmp_path / "gemma4", "gemma4", **tied)
    config = json.loads((source / "config.json").read_text())
    del config["text_config"]["per_layer_config"]
    config["text_config"] |= {**tied, "global_head_dim": 16}
    (source / "config.json").write_text(json.dumps(config))
    out, inputs = fold(source, "gqa", "--to", "gqa", "--kv-heads", "2"), TOWERS["gemma4"][1]()
    torch.testing.assert_close(logits(out, inputs), logits(source, inputs), atol=5e-6, rtol=0)
    written = json.loads((out / "config.json").read_text())["text_config"]
    assert "per_layer_config" not in written
    assert (written["num_key_value_heads"], written["num_global_key_value_heads"]) == (2, 1)


def test_the_tower_alone_is_a_causal_language_model(source: Path) -> None:
    latent = ("--to", "mla", "--rank", "full", "--container", "remote")
    grouped = ("--to", "gqa", "--kv-heads", "2")  # of equal heads
    # One normalises its keys behind the rotation, the other's layers are unlike.
    is_latent = source.name not in {"llama4", "gemma4"}
    out = fold(source, "alone", *(latent if is_latent else grouped), "--text-only")
    ids = torch.arange(20)[None] * 3 % 80
    expected = logits(source, {"input_ids": ids})
    tower = out.with_name(out.name + ".tower")
    stock = AutoModelForCausalLM.from_pretrained(tower, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, expected, atol=5e-6, rtol=0)
        load = KvfoldForCausalLM if is_latent else AutoModelForCausalLM
        folded = load.from_pretrained(out, dtype=torch.float32).eval()
        torch.testing.assert_close(folded(ids).logits, expected, atol=5e-6, rtol=0)
    assert not any("vision" in name or "visual" in name for name in load_file(out / "model.safetensors"))


def test_a_tower_that_stays_is_used_again(tmp_path: Path) -> None:
    source = make_multimodal(tmp_path / "llava", "llava")
    out = fold(source, "alone", "--to", "mqa", "--text-only")
    weights = (tmp_path / "llava-alone.tower" / "model.safetensors").stat()
    shutil.rmtree(out)
    fold(source, "alone", "--to", "mqa", "--text-only")
    assert (tmp_path / "llava-alone.tower" / "model.safetensors").stat() == weights


@pytest.mark.parametrize(("change", "options", "words"), [
    ({}, ("--to", "mla", "--rank", "full", "--container", "remote"),
     "takes no text model with code of its own"),
    ({}, ("--to", "mqa", "--dtype", "bfloat16"), "keep their bytes"),
    ({}, ("--to", "mla", "--engine", "vllm"), "--engine vllm: it is not known whether it runs latent"),
    ({"text_config": {"model_type": "mamba"}}, ("--to", "mqa"),
     "model_type mamba, which kvfold cannot fold: it has no"),
    ({"text_config": {"model_type": "gemma3n_text"}}, ("--to", "gqa", "--kv-heads", "2"),
     "its layers share keys and values, or differ in their widths"),
    ({"is_encoder_decoder": True}, ("--to", "mqa"), "an encoder-decoder model"),
    ({"model_type": "clip"}, ("--to", "mqa"), "has no text tower|cannot fold"),
])  # fmt: skip
def test_what_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], options: tuple[str, ...], words: str
) -> None:
    """One sentence, before anything is written."""
    source = make_multimodal(tmp_path / "llava", "llava")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ClickException, match=words):
        fold(source, "out", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["llava"]


@pytest.mark.parametrize("content", ["absent", None])
@pytest.mark.parametrize("kind", TOWERS)
def test_a_config_without_a_text_config_is_refused(kind: str, content: Any, tmp_path: Path) -> None:
    """Its class would take the defaults of a model of billions of parameters."""
    source = make_multimodal(tmp_path / kind, kind)
    config = json.loads((source / "config.json").read_text())
    del config["text_config"]
    if content != "absent":
        config["text_config"] = content
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClickException, match=f"no text_config, which describes the text tower of a {kind};"):
        fold(source, "out", "--to", "mqa")
    assert [path.name for path in tmp_path.iterdir()] == [kind]


@pytest.mark.parametrize("options", [("--text-only",), ("--text-only", "--dry-run"), ("--dry-run",)])
def test_errors_about_a_tower_name_the_source(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Its directory and its tensors, and no directory of kvfold's own."""
    source = make_multimodal(tmp_path / "llava", "llava")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClickException) as refused:
        fold(source, "out", "--to", "mqa", *options)
    said = str(refused.value)
    assert f"the text tower of {source} has language_model.model.layers.1." in said
    assert ".tower" not in said
    assert "kvfold-tower-" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["llava"]


def test_a_source_in_the_home_directory_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_multimodal(tmp_path / "llava", "llava")
    assert fold_request({"model": "~/llava", "to": "mqa"}).source_name is None
    out = tmp_path / "out"
    kvfold.fold("~/llava", kvfold.MQA(), out=out, calibration="none", verify="none")
    assert json.loads((out / "kvfold.json").read_text())["source"]["name"] == "llava"


def test_other_commands_name_the_way_to_a_text_tower(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"model_type llava\); write its text tower .* --text-only"):
        build_empty(make_multimodal(tmp_path / "llava", "llava"), None, torch.float32)


def test_a_text_model_has_no_tower_to_take_out(tmp_path: Path) -> None:
    with pytest.raises(ClickException, match="which is not a multimodal model"):
        fold(make(tmp_path / "llama", "llama"), "out", "--to", "mqa", "--text-only")
