"""Files next to the weights, statistics, records, reports and names that are damaged or hostile."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvfold import recipes
from kvfold.cli import main

from ..support.pages import record, write_checkpoint
from .conftest import GQA, WEIGHTS, Scene, edit_json

SECRET = "the secret key"
pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, pipes and names of bytes")


def outside(path: Path) -> None:
    secret = path.parent.parent / "secret.key"
    secret.write_text(SECRET)
    path.symlink_to("../secret.key")


def large(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**28 + 1)  # no byte of it is stored


KINDS: dict[str, Callable[[Path], object]] = {
    "outside": outside,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.symlink_to("nothing"),
    "circle": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "large": large,
}
NAMES = ("LICENSE", "NOTICE", "USE_POLICY.md", "tokenizer.json", "tokenizer.model", "merges.txt", "README.md")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_side_file_that_is_not_the_sources_own(scene: Scene, source: Path, name: str, kind: str) -> None:
    (source / name).unlink(missing_ok=True)
    KINDS[kind](source / name)
    sentence = scene.refused("convert", source, *WEIGHTS, "--out", scene.root / "out", says=name)
    assert SECRET not in sentence


def test_links_of_the_hubs_cache_are_followed(scene: Scene, source: Path) -> None:
    snapshot = scene.root / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    blobs = scene.root / "models--org--tiny" / "blobs"
    blobs.mkdir()
    source.rename(snapshot)
    (snapshot / "LICENSE").write_text("My terms")
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    out = scene.root / "out"
    assert scene.survived("convert", snapshot, *WEIGHTS, "--out", out)
    assert (out / "LICENSE").read_text() == "My terms"
    assert not (out / "LICENSE").is_symlink()
    assert (out / "tokenizer.json").is_file()


def test_half_a_character_is_no_text(scene: Scene, source: Path) -> None:
    (scene.root / "text.jsonl").write_text('{"text": "a \\ud800 b"}\n' * 20)
    (scene.root / "rows.json").write_text('{"text": ["a \\ud800 b"]}')
    demo = Path(recipes.__file__).parent / "demo"
    words = ("convert", demo, *GQA, "--calibration", scene.root / "text.jsonl", "--out", scene.root / "out")
    scene.refused(*words, says="text.jsonl")
    rows = ("--text", "wikitext2-gptq-16", "--rows", scene.root / "rows.json")
    scene.refused("eval", source, *rows, "--suite", "ppl", says="holds no rows")


def test_nobody_is_asked_about_code_of_a_multimodal_model(
    scene: Scene, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on a terminal unless it is told that code is not trusted."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    (source / "evil.py").write_text(f"open({str(scene.canary)!r}, 'w')\nclass Evil: pass\n")
    parts = {"text_config": {"num_hidden_layers": 2}, "vision_config": {}}
    named = {"model_type": "evil_vl", "auto_map": {"AutoConfig": "evil.Evil"}, **parts}
    edit_json(source / "config.json", lambda content: content.update(named))
    scene.refused("convert", source, *WEIGHTS, "--out", scene.root / "out")
    assert not asked


FRONT_MATTER = {
    "deep": "a: " + "[" * 100_000,
    "wide": "a: &a [1]\n"
    + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{f'*{chr(97 + n)}, ' * 9}]\n" for n in range(9)),
    "broken": "license: [",
    "list": "- a",
    "tags": "tags: [{a: 1}]",
    "number": "tags: 7",
    "index": "model-index: 7",
    "text": "model-index: [7]",
}


@pytest.mark.parametrize("metadata", FRONT_MATTER.values(), ids=FRONT_MATTER)
def test_front_matter_is_refused_before_the_work(
    scene: Scene, fold: Path, source: Path, metadata: str
) -> None:
    for place in (source, fold):
        (place / "README.md").write_text(f"---\n{metadata}\n---\n# x\n")
    scene.refused("convert", source, *WEIGHTS, "--out", scene.root / "out", says="README.md")
    scene.refused("publish", fold, "org/x", "--dry-run", "--verify", "lint", says="README.md")


def published(fold: Path) -> dict[str, Any]:
    done = CliRunner().invoke(
        main, ["publish", str(fold), "org/x", "--dry-run", "--json", "--verify", "lint"]
    )
    assert done.exit_code == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_only_what_a_checkpoint_consists_of_is_published(scene: Scene, fold: Path) -> None:
    usual = set(published(fold)["files"])
    outside(fold / "LICENSE")
    KINDS["zeros"](fold / "NOTICE")
    os.mkfifo(fold / "pipe.json")
    (fold / "notes.txt").symlink_to("/etc/passwd")
    (fold / "hf_token.json").write_text('"hf_secret"')
    (fold / "vocab_private.txt").write_text("secret")
    (fold / "optimizer.pt").write_bytes(b"\x80\x04K\x01.")
    (fold / "adapter.safetensors").write_bytes(b"")
    (fold / ".env").write_text("KEY=1")
    for name in (".git", "wandb", "pictures"):
        (fold / name).mkdir()
        (fold / name / "private.png").write_bytes(b"x")
    (fold / "etc").symlink_to("/etc")
    (fold / "pictures" / "shown.png").write_bytes(b"x")
    (fold / "README.md").write_text(
        "---\nlicense: mit\n---\n# x\n![a](pictures/shown.png)\n"
        '![b](../secret.key)\n![c](/etc/passwd)\n<img src="../secret.png">\n![d](etc/shadow.png)\n'
    )
    told = published(fold)
    assert set(told["files"]) == usual | {"pictures/shown.png"}
    assert {name for name in told["left_out"] if name in usual} == set()
    assert set(told["left_out"]) == {
        "LICENSE", "NOTICE", "pipe.json", "notes.txt", "hf_token.json", "optimizer.pt",
        "adapter.safetensors", "vocab_private.txt", ".env", ".git/", "wandb/", "pictures/", "etc/",
    }  # fmt: skip
    assert told["left_out"]["LICENSE"] == "is a link to a file outside of the checkpoint"
    assert SECRET not in json.dumps(told)


def test_the_code_of_an_output_is_published_if_it_is_kvfolds(scene: Scene, source: Path) -> None:
    out = scene.root / "out"
    words = ("--to", "mla", "--kv-budget", "50%", "--container", "remote", "--calibration", "none")
    assert scene.survived("convert", source, *words, "--out", out)
    assert {path.name for path in out.glob("*.py")} <= set(published(out)["files"])
    (out / "modeling_kvfold.py").write_text(f"open({str(scene.canary)!r}, 'w')")
    scene.refused("publish", out, "org/x", "--dry-run", "--verify", "lint", says="code")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "kvfold.json"])
def test_needed_files_that_are_elsewhere_are_not_published(scene: Scene, fold: Path, name: str) -> None:
    (fold / name).rename(scene.root / "elsewhere")
    (fold / name).symlink_to("../elsewhere")
    scene.refused("publish", fold, "org/x", "--dry-run", "--verify", "lint", says=name)


def with_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["1.output_fisher"] = change(tensors["1.output_fisher"]).contiguous()

    return damage


STATISTICS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "NaN": with_tensor(lambda tensor: tensor / 0 * 0),
    "infinite": with_tensor(lambda tensor: tensor / 0),
    "float32": with_tensor(lambda tensor: tensor.float()),
    "a row less": with_tensor(lambda tensor: tensor[1:]),
    "flat": with_tensor(lambda tensor: tensor.flatten()),
    "empty": with_tensor(lambda tensor: tensor[:0, :0]),
    "integers": with_tensor(lambda tensor: tensor.long()),
    "absent": lambda tensors: tensors.pop("1.output_fisher"),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_damaged_statistics(originals: Path, scene: Scene, source: Path, name: str) -> None:
    file = originals / "taken.safetensors"
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(file)
    STATISTICS[name](tensors)
    taken = scene.root / "taken.safetensors"
    save_file(tensors, taken, metadata)
    for command in ("convert", "plan"):
        options = (*GQA, "--out", scene.root / "out") if command == "convert" else ()
        says = "1.output_fisher"
        scene.refused(command, source, *options, "--calibration", taken, says=says)


@pytest.mark.parametrize(
    "metadata",
    [
        "[" * 100_000, "[]", "null", "{}", '{"schema": 3}',
        '{"schema": 3, "tokens": "x", "calibration": "self", "seed": 0, "layers": 2}',
        '{"schema": 3, "tokens": 1, "calibration": "self", "seed": 0, "layers": 1000000000}',
        '{"schema": 3, "tokens": 1, "calibration": "self", "seed": 0, "layers": -1}',
        '{"schema": [3], "tokens": 1, "calibration": 7, "seed": 0, "layers": 2}',
    ],
)  # fmt: skip
def test_metadata_of_statistics(originals: Path, scene: Scene, source: Path, metadata: str) -> None:
    taken = scene.root / "taken.safetensors"
    save_file(load_file(originals / "taken.safetensors"), taken, {"kvfold.statistics": metadata})
    scene.refused("convert", source, *GQA, "--calibration", taken, "--out", scene.root / "out")


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of an object that replaces the value at a place."""

    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def without(*keys: str) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no stage": without("stage"),
    "no name": without("source", "name"),
    "no path": without("source", "path"),
    "list as source": put("source", value=[]),
    "stage is a number": put("stage", value=7),
    "cache is a text": put("cache", value="x"),
    "cache is beyond all floats": put("cache", "after", "bytes_per_token", value=10**4000),
    "cache is text inside": put("cache", "after", "bytes_per_token", value="9"),
    "target has no name": without("target", "name"),
    "parents hold numbers": put("parents", value=[1]),
    "revision is a list": put("source", "revision", value=[]),
    "calibration is a text": put("calibration", value="x"),
    "predicted is infinite": put("predicted_loss", value=float("inf")),
    "schema is a list": put("schema", value=[1]),
    "schema is true": put("schema", value=True),
    "half a character": put("source", "name", value="\ud800"),
    "layers are numbers": put("layers", value=[1, 2]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_damaged_records(scene: Scene, fold: Path, name: str) -> None:
    edit_json(fold / "kvfold.json", RECORDS[name])
    for words in (("verify", fold, "--lint"), ("publish", fold, "org/x", "--dry-run", "--verify", "lint")):
        scene.refused(*words, says="kvfold.json")


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", "7", "null", "{", "\xff", '{"schema": ' + "9" * 5000 + "}"]
)
@pytest.mark.parametrize("file", ["kvfold.json", "eval.json"])
def test_files_that_are_not_json(scene: Scene, fold: Path, file: str, content: str) -> None:
    (fold / file).write_bytes(content.encode("latin-1"))
    scene.refused("publish", fold, "org/x", "--dry-run", "--verify", "lint", says=file)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "7",
        '{"tokens": 1, "kl": 1e999}',
        '{"tokens": Infinity, "kl": 1}',
        '{"tokens": "x", "kl": 1}',
        "\xff",
    ],
)
def test_a_forged_training_log(scene: Scene, line: str) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    fold = write_checkpoint(scene.root / "fold", kept=record())
    (fold / "metrics.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    scene.refused("report", fold, "--out", scene.root / "page.html", says="metrics.jsonl")


@pytest.mark.parametrize(
    ("assertion", "says"),
    [
        ("kl.meen<1", "has no kl"),
        ("fidelity.kl.meen<1", "fidelity.kl has no meen"),
        ("ppl.student.perplexity.x<1", "single value"),
        ("fidelity.kl<1", "not a number"),
        ("protocol.name<1", "not a number"),
    ],
)
def test_a_wrong_assertion_is_told_before_the_work(
    scene: Scene, fold: Path, assertion: str, says: str
) -> None:
    (fold / "model.safetensors").unlink()  # which would be the next thing that is missed
    scene.refused("eval", fold, "--text", "stdlib", "--assert", assertion, says=says)


@pytest.mark.parametrize("name", ["[bold]x[bold]", "[", "a\x1b[31mb", "a\nb", ":smile:", "ä漢"])
def test_names_are_shown_as_text(scene: Scene, fold: Path, name: str) -> None:
    place = fold.rename(scene.root / name)
    done = CliRunner().invoke(main, ["verify", str(place), "--lint"])
    assert done.exit_code == 0, done.output
    shown = done.stdout.replace("\n", "")
    assert "\x1b" not in done.stdout
    if name.isprintable():
        assert name in shown
    (place / "config.json").write_text("{")
    scene.refused("verify", place, "--lint")


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes")
def test_names_that_are_not_utf_8(scene: Scene, source: Path) -> None:
    place = source.rename(scene.root / os.fsdecode(b"a\xff"))
    scene.refused("convert", place, *WEIGHTS, "--out", scene.root / "out", says="UTF-8")
    place = place.rename(scene.root / "source")
    scene.refused("convert", place, *WEIGHTS, "--out", scene.root / os.fsdecode(b"o\xff"), says="UTF-8")
