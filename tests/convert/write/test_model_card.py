"""Model cards: what an output says of itself, and what becomes of a card that its owner wrote."""

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

from kvfold.checkpoints.cost_blocks import CacheBlock, ModelCache
from kvfold.checkpoints.eval_json import EvalReport, MeasuredCheckpoint, TextProtocol, measured_by
from kvfold.checkpoints.quality_blocks import (
    Estimate,
    FidelityBlock,
    ModelPerplexity,
    PerplexityBlock,
    RecoveredLoss,
)
from kvfold.checkpoints.record import hub_id, read_record, source_directory, write_record
from kvfold.convert.write import card_body
from kvfold.convert.write.model_card import make_card, write_card, written_by_kvfold

from ...support.commands import run_main
from ...support.tiny import make

ROOT = Path(__file__).parents[3]
GONE = MeasuredCheckpoint(path="gone", name="gone", identity="")


def evaluated(perplexity: float = 12.5, cache_dtype: str | None = None) -> EvalReport:
    def scores(found: float) -> ModelPerplexity:
        return ModelPerplexity("float32", found, Estimate(0.0), 0.0, 1.0, None, ())

    def cache(elements: float) -> ModelCache:
        return ModelCache(elements, None, elements, 2 * elements, "float32", None, "float32", 0, ())

    ppl = PerplexityBlock(scores(perplexity), scores(11.25), None, None, None, RecoveredLoss(), ())
    fidelity = FidelityBlock(
        Estimate(0.125, 0.01), {}, 1.0, Estimate(0.875), Estimate(0.0), Estimate(0.0), {}, None, ()
    )
    blocks = {
        "ppl": ppl,
        "fidelity": fidelity,
        "cache": CacheBlock(cache(64.0), cache(128.0), None, 0.5, None),
    }
    protocol = TextProtocol(
        name="text:held-out.txt", text_sha256="ab" * 32, window=64, windows=3, scored_tokens=189
    )
    return EvalReport(2, GONE, GONE, None, protocol, blocks, "cpu", {}, cache_dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make(tmp_path_factory.mktemp("models") / "source")
    (directory / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# The source\n")
    return directory


@pytest.fixture(scope="module")
def outputs(source: Path) -> dict[str, Path]:
    """A checkpoint of each layout."""
    options = {
        "grouped": ["--to", "gqa", "--kv-heads", "2"],
        "stock": ["--to", "mla", "--kv-budget", "50%"],
        "remote": ["--to", "mla", "--kv-budget", "50%", "--container", "remote"],
    }
    for name, words in options.items():
        out = source.with_name(name)
        run_main("convert", source, *words, "--calibration", "none", "--out", out)
    return {name: source.with_name(name) for name in options}


def card_of(directory: Path) -> ModelCard:
    return ModelCard.load(directory / "README.md")


def remade(directory: Path, evaluation: EvalReport | None = None) -> ModelCard:
    record = read_record(directory)
    assert record is not None
    return make_card(directory, record, "tiny", "org/tiny", evaluation)


@pytest.mark.parametrize("layout", ["grouped", "stock", "remote"])
def test_a_converted_checkpoint_has_a_card(outputs: dict[str, Path], layout: str) -> None:
    directory = outputs[layout]
    card, record = card_of(directory), json.loads((directory / "kvfold.json").read_text())
    weights = load_file(directory / "model.safetensors")
    assert written_by_kvfold(card.text)
    fields = [card.data[field] for field in ("license", "library_name", "pipeline_tag")]
    assert fields == ["mit", "transformers", "text-generation"]
    assert {"kvfold", record["target"]["name"]} <= set(card.data["tags"])
    assert card.data.get("base_model") is None  # the source was a directory
    assert f"$ {record['command'].replace(record['source']['path'], record['source']['name'])}\n" in card.text
    assert str(directory.parent) not in card.text
    after = record["cache"]["after"]
    assert f"| elements per token and layer | 128 | {after['elements_per_token_per_layer']} |" in card.text
    assert f"| bytes per token (float32) | 1,024 | {after['bytes_per_token']:,} |" in card.text
    trusting = [option in card.text for option in ("trust_remote_code=True", "--trust-remote-code")]
    assert trusting == [layout == "remote"] * 2
    place = "model.layers.0.self_attn."
    parts = {name.removeprefix(place).partition(".")[0] for name in weights if name.startswith(place)}
    names = {name for name in parts if name.endswith(("_proj", "_mqa"))}
    named = all(f"`{name}`" in card.text for name in names)
    assert named == (layout != "grouped"), "not for the source's own names"


def test_the_card_says_of_each_engine_what_the_rules_say(outputs: dict[str, Path]) -> None:
    from kvfold.engines.rules.engine_rules import lint

    commands = {
        "transformers": "from_pretrained", "vllm": "vllm serve .", "vllm+kvfold": "pip install kvfold",
        "sglang": "--model-path .", "llama.cpp": "convert_hf", "mlx": "mlx_lm.generate",
    }  # fmt: skip
    refused = 0
    for directory in outputs.values():
        sections = dict(zip(commands, card_of(directory).text.split("\n### ")[1:], strict=True))
        for engine, section in sections.items():
            failing = [finding for finding in lint(directory, [engine]) if finding.fails]
            assert (commands[engine] in section) == (not failing), (directory, engine)
            assert all(finding.sentence in section for finding in failing)
            refused += len(failing)
    assert refused


def test_measurements_are_metadata_and_a_table(outputs: dict[str, Path]) -> None:
    card = remade(outputs["stock"], evaluated())
    found = {result.metric_type: result for result in ModelCard(str(card)).data.eval_results}
    assert {kind: result.metric_value for kind, result in found.items()} == {
        "perplexity": 12.5,
        "kl_divergence": 0.125,
        "same_top1": 0.875,
    }
    assert found["perplexity"].dataset_args == {"text_sha256": "ab" * 32, "window": 64, "windows": 3}
    assert "| source | 11.25 | 128 | float32 |\n| this model | 12.5 | 64 | float32 |" in card.text
    assert 'from_pretrained("org/tiny"' in card.text


def test_a_card_says_in_which_format_the_cache_was(outputs: dict[str, Path]) -> None:
    card = remade(outputs["stock"], evaluated(cache_dtype="int4"))
    assert "| this model, its cache in int4 | 12.5 | 64 | float32 |" in card.text
    assert {result.dataset_args["cache_dtype"] for result in card.data.eval_results} == {"int4"}


def test_a_users_text_is_kept_and_metadata_is_merged(outputs: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(outputs["remote"], tmp_path / "copy")
    text = "\n# Mine\r\n\n---\nA rule, and *my* words.\n"
    (copy / "README.md").write_bytes(
        f"---\nlicense: cc0-1.0\ntags: [mine]\nextra: {{a: 1}}\n---\n{text}".encode()
    )
    card = remade(copy, evaluated())
    assert card.text == text
    fields = [card.data[field] for field in ("license", "extra", "library_name")]
    assert fields == ["cc0-1.0", {"a": 1}, "transformers"]
    assert card.data["tags"] == ["mine", "kvfold", "kv-cache", "mla", "latent-attention"]
    # A later measurement takes the place of an earlier one of the same kind, and of nothing else.
    (copy / "README.md").write_text(str(card).replace("type: kl_divergence", "type: rouge"), newline="")
    results = remade(copy, evaluated(12.0)).data.eval_results
    assert sorted((result.metric_type, result.metric_value) for result in results) == [
        ("kl_divergence", 0.125), ("perplexity", 12.0), ("rouge", 0.125), ("same_top1", 0.875),
    ]  # fmt: skip


def test_a_text_without_metadata_is_kept_whole(outputs: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(outputs["remote"], tmp_path / "copy")
    (copy / "README.md").write_text("Only words.\n")
    card = remade(copy)
    assert card.text == "Only words.\n"
    assert card.data["license"] == "mit"


def test_our_text_is_made_anew_and_an_edited_one_is_theirs(outputs: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(outputs["remote"], tmp_path / "copy")
    ours = (copy / "README.md").read_text()
    (copy / "README.md").write_text(ours.replace("license: mit", "license: cc0-1.0"))
    card = remade(copy)
    assert card.text.startswith("\n# tiny\n")
    assert card.data["license"] == "cc0-1.0"  # metadata is theirs in any case
    (copy / "README.md").write_text(ours.replace("## KV cache", "## My heading"))
    assert "## My heading" in remade(copy).text


def test_a_distilled_checkpoint_tells_its_recipe(outputs: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(outputs["remote"], tmp_path / "copy")
    (copy / "README.md").unlink()
    record = read_record(copy)
    source = {**record["source"], "name": "org/base", "revision": "0" * 40}
    record |= {
        "stage": "distill",
        "source": source,
        "distill": {"recipe": {"student": "out", "stages": [{"lr": 0.5}]}},
    }
    write_record(copy, record)
    write_card(copy, record)
    card = card_of(copy)
    assert (card.data["base_model"], card.data["base_model_relation"]) == ("org/base", "finetune")
    assert "distillation" in card.data["tags"]
    assert "$ kvfold distill recipe.yaml" in card.text
    assert "stages:\n- lr: 0.5\n" in card.text


def test_a_card_has_names_for_paths_of_its_author(outputs: dict[str, Path]) -> None:
    record = read_record(outputs["stock"])
    record |= {
        "command": "kvfold convert /home/me/a/ --to mla --calibration '/home/me/my text.txt' --seed 0",
        "source": {**record["source"], "name": "org/base", "path": "/home/me/a", "revision": "0" * 40},
        "distill": {
            "recipe": {"student": "/home/me/out/a-mla", "data": {"source": ["self", "self+/home/me/t"]}}
        },
        "quantize": {"command": "kvfold quantize out/a --scheme int4 --out /home/me/q", "scheme": "int4"},
    }
    text = make_card(outputs["stock"], record, "tiny", "org/tiny").text
    assert "/home" not in text
    assert "$ kvfold convert org/base --to mla --calibration 'my text.txt' --seed 0\n" in text
    assert "$ kvfold quantize out/a --scheme int4 --out q\n" in text
    assert "student: a-mla\ndata:\n  source:\n  - self\n  - self+t\n" in text


@pytest.mark.parametrize(("student", "output", "names"), [
    ("/m/out.partial/folded/25%", "/m/out.partial/distilled/25%", ("25%", "25%-distilled")),
    ("out/fold", "out/fold-distilled", ("out/fold", "out/fold-distilled")),
])  # fmt: skip
def test_the_commands_of_a_card_read_what_the_ones_above_write(
    outputs: dict[str, Path], student: str, output: str, names: tuple[str, str]
) -> None:
    record = read_record(outputs["stock"])
    assert record is not None
    record |= {
        "command": "kvfold convert demo --to mla",
        "stage": "distill",
        "parents": [{"stage": "convert", "path": student}],
        "distill": {"recipe": {"student": student, "output": output}},
    }
    text = make_card(outputs["stock"], record, "tiny", "org/tiny").text
    shown = f"$ kvfold convert demo --to mla --out {names[0]}\n$ kvfold distill recipe.yaml\n"
    assert shown in text
    assert f"student: {names[0]}\noutput: {names[1]}\n" in text


ADDRESSED = (
    "x`\n```\n<img src=a>\n# owned\n[here](http://a) \x1b[31m\u202e | \\| <img src=b> www.evil.example"
)
MARKED = "# x` _owned_ __owned__ ~~owned~~ *owned* <img src=a> [here](a) &lt; | \\| <img src=b>"


@pytest.mark.parametrize("evil", [ADDRESSED, MARKED])
def test_texts_of_a_record_are_no_markup(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: str
) -> None:
    """A record, its recipe included, may be anybody's: none of its texts leaves its place in the card."""
    monkeypatch.setattr(card_body, "is_quantised", lambda directory: True)
    copy = shutil.copytree(outputs["grouped"], tmp_path / "copy")
    (copy / "README.md").unlink()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "bloom", "architectures": [evil]}))
    record = read_record(copy)
    record |= {"command": evil, "method": evil, "kvfold": evil, "dtype": evil, "quantize": {"scheme": evil}}
    record["quantize"]["command"] = evil
    rounded = {key: value for key, value in record.items() if key != "target"}
    record["source"] = {**record["source"], "name": evil, "path": evil, "revision": evil}
    record["calibration"] = {"text": evil, "tokens": 1, "seed": 0}
    record["target"][evil] = evil
    record["distill"] = {"recipe": {"note": "a\n```\n````\n# owned", "other": evil}}
    for each in (record, rounded):
        text = make_card(copy, each, evil, "org/tiny").text
        page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
        assert page.count("<h1>") == 1
        for tag in ("<img", "href", "<em>", "<strong>", "<s>"):
            assert tag not in page
        assert "its class is" in page
        assert "OWNED" in page
        assert "org/tiny" in page
        # Other readers make links of addresses outside code.
        assert not re.search("://|www", re.sub("<code.*?</code>", "", page, flags=re.DOTALL), re.IGNORECASE)
        assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_names_of_weights_are_no_markup(outputs: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(outputs["remote"], tmp_path / "copy")
    (copy / "README.md").unlink()
    tensors = load_file(copy / "model.safetensors")
    known = next(name for name in tensors if ".kv_b_proj." in name)
    tensors[known.replace("kv_b_proj", "proj`<img src=a>")] = tensors[known].clone()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    page = MarkdownIt("commonmark").render(remade(copy).text)
    assert "proj'&lt;img src=a&gt;" in page
    assert "<img" not in page


def test_the_hub_id_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = "/x/hub/models--org--tiny/snapshots/0123"
    assert hub_id({"name": "0123", "path": cached, "revision": "0123"}) == "org/tiny"
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr("kvfold.checkpoints.record.resolve", lambda *asked: seen.append(asked))
    record = {"source": {"name": "0123", "path": cached, "revision": "0123"}}
    monkeypatch.setattr("kvfold.checkpoints.record.read_record", lambda _: record)
    source_directory(tmp_path)
    assert seen == [("org/tiny", "0123")], "a source in a cache that was cleared is downloaded by its id"
    assert hub_id({"name": "org/tiny", "path": "/y", "revision": "0123"}) == "org/tiny"
    assert hub_id({"name": "tiny", "path": "/y/tiny", "revision": None}) is None


@pytest.mark.parametrize(("file", "text", "wanted"), [
    ("LICENSE", "  Apache License\n  Version 2.0, January 2004", {"license": "apache-2.0"}),
    ("LICENSE.txt", "My own terms", {"license": "other", "license_link": "LICENSE.txt"}),
    ("config.json", '{"license": "gemma"}', {"license": "gemma"}),
    ("README.md", "---\nlicense: [\n---\n", {}),
])  # fmt: skip
def test_licences(
    outputs: dict[str, Path], tmp_path: Path, file: str, text: str, wanted: dict[str, str]
) -> None:
    from kvfold.convert.write.model_card import metadata

    (tmp_path / file).write_text(text)
    record = {**json.loads((outputs["stock"] / "kvfold.json").read_text())}
    record["source"]["path"] = str(tmp_path)
    found = metadata(outputs["stock"], record)
    assert {key: value for key, value in found.items() if key.startswith("license")} == wanted


def test_what_eval_writes_is_what_the_card_reads(tmp_path: Path) -> None:
    """The command and the card, without a copy of the report's shape between them."""
    directory = shutil.copytree(ROOT / "recipes" / "demo", tmp_path / "demo")
    (tmp_path / "text.txt").write_text("def fold(cache): return cache[:, ::4]\n" * 40)
    words = ["eval", str(directory), "--teacher", str(directory), "--text", str(tmp_path / "text.txt")]
    words += ["--window", "32", "--max-windows", "2", "--out", str(directory / "eval.json"), "--json"]
    run_main(*words)
    found = measured_by(directory)
    assert found.ppl.student.perplexity == found.ppl.teacher.perplexity
    assert found.cache.student.elements_per_token_per_layer == 256
    assert found.fidelity.kl.mean == pytest.approx(0, abs=1e-6)
