"""Damaged and hostile checkpoints: a table of (source, damage, sentence), and what must never happen."""

import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvfold import recipes
from kvfold.checkpoints.shards import INDEX
from kvfold.cli import main

from ..support.commands import run_main
from ..support.quantised import FORMATS, quantise, quantised_tower
from ..support.tiny import ROPE, make
from ..support.towers import make_multimodal
from .conftest import GQA, WEIGHTS, Scene

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, pipes and names of bytes")
Damage = Callable[[Path], object]
DEMO = Path(recipes.__file__).parent / "demo"
SECRET = "the secret key"
DEEP = "[" * 100_000
GATE = "model.layers.0.mlp.gate_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj"


def edited(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change a JSON file of an object in place."""

    def damage(source: Path) -> None:
        value = json.loads((source / file).read_text())
        change(value)
        (source / file).write_text(json.dumps(value))

    return damage


def config(part: str = "", **changes: Any) -> Damage:
    """Change fields of config.json, or of an object in it."""
    return edited("config.json", lambda value: (value[part] if part else value).update(changes))


def rope(**changes: Any) -> Damage:
    return config(rope_parameters={**ROPE["llama3"], **changes})


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(source: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, source / "model.safetensors", {"format": "pt"})

    return damage


def without(name: str) -> Damage:
    return weights(lambda tensors: tensors.pop(next(found for found in tensors if found.endswith(name))))


def cut(name: str) -> Damage:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        full = next(found for found in tensors if found.endswith(name))
        tensors[full] = tensors[full][:-1].clone()

    return weights(damage)


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the header of the weights; what it returns, if it is a text, is the new header."""

    def damage(source: Path) -> None:
        file = source / "model.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        rows = json.loads(content[8 : 8 + length])
        found = change(rows)
        text = found if isinstance(found, str) else json.dumps(rows)
        file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[8 + length :])

    return damage


def row(**fields: Any) -> Damage:
    return header(lambda rows: rows[GATE].update(fields))


def written(name: str, text: str) -> Damage:
    return lambda source: (source / name).write_text(text)


def indexed(text: str) -> Damage:
    """Name the weights as a shard, with an index of this content."""

    def damage(source: Path) -> None:
        (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
        (source / INDEX).write_text(text)

    return damage


# Source (a family, a format of quantised weights, or a multimodal model), damage, sentence.
CONVERTED: list[tuple[str, Damage, str]] = [
    ("llama", header(lambda rows: rows.pop(GATE)), "model.safetensors is truncated, damaged or no"),
    ("llama", row(shape=[-48, -32]), "is truncated, damaged or no safetensors"),
    ("llama", row(shape=[0, 2**61, 2**61]), "is truncated, damaged or no safetensors"),
    ("llama", row(data_offsets=None), "is truncated, damaged or no safetensors"),
    ("llama", header(lambda rows: f'{{"a": {DEEP}'), "is truncated, damaged or no safetensors"),
    ("llama", header(lambda rows: "[]"), "is truncated, damaged or no safetensors"),
    ("llama", config(vocab_size=99), "has shape (97, 32), but config.json implies (99, 32)"),
    ("llama", config(num_hidden_layers=1), "has model.layers.1."),
    ("llama", without("up_proj.weight"), "up_proj.weight"),
    ("llama", config(pad_token_id=97), "cannot be loaded"),
    ("llama", config(num_hidden_layers=2**31), f"num_hidden_layers {2**31}"),
    ("llama", config(model_type=["llama"]), "model_type ['llama'], where a string"),
    ("llama", config(hidden_act="nope"), "cannot be loaded (KeyError)"),
    ("llama", rope(rope_type="spiral"), "spiral"),
    ("llama", rope(factor="8"), "config.json has factor '8'"),
    ("llama", written("config.json", f'{{"a": {DEEP}'), "levels deep"),
    ("llama", indexed('{"weight_map": {"a": "../source/a.safetensors"}}'),
     "has the shard '../source/a.safet"),
    ("llama", indexed("{}"), "it has no weight_map"),
    ("llama", config(transformers_weights="adapter_model.bin"), "transformers_weights"),
    ("llama", written("adapter_config.json", "{}"), "has an adapter"),
    ("llama", written("generation_config.json", DEEP), "levels deep"),
    ("llama", written("README.md", "---\nlicense: [\n---\n"), "README.md"),
    ("llama", written("README.md", f"---\na: {DEEP}\n---\n"), "README.md"),
    ("qwen3", without("0.self_attn.k_norm.weight"), "has no model.layers.0"),
    ("mixtral", without("experts.3.w1.weight"), "cannot be loaded"),
    ("falcon", config(num_kv_heads=3), "do not share 3"),
    ("gptq", config("quantization_config", quant_method="x"), "quantised by 'x', which kvfold does not read"),
    ("gptq", config(quantization_config=7), "quant"),
    ("llava", config(text_config=[1]), "text_config"),
    ("llava", config("text_config", num_hidden_layers=3), "layers.2"),
    ("llava", without("layers.1.self_attn.k_proj.weight"), "layers.1.self_attn.k_proj.weight"),
    ("llava", config(quantization_config={"quant_method": "fp8"}), "but no quantised weight"),
    ("llava fp8 blocks", without("language_model.model.layers.1.mlp.up_proj.weight_scale_inv"), "has no "),
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from the name of a source to a sound one, which is made once."""
    root = tmp_path_factory.mktemp("sound")

    def give(name: str) -> Path:
        directory = root / name.replace(" ", "-")
        if directory.exists():
            return directory
        if name == "llava":
            return make_multimodal(directory, name)
        if name.startswith("llava "):
            return quantise(give("llava"), directory, quantised_tower(name.removeprefix("llava ")))
        if name not in FORMATS:
            return make(directory, name)
        form = FORMATS[name]
        plain = root / f"plain-{form.family}"
        if not plain.exists():
            make(plain, form.family, intermediate_size=64)
        return quantise(plain, directory, form)

    return give


@pytest.mark.parametrize(("name", "damage", "sentence"), CONVERTED)
def test_a_damaged_source_is_refused(
    scene: Scene, sound: Callable[[str], Path], name: str, damage: Damage, sentence: str
) -> None:
    source = Path(shutil.copytree(sound(name), scene.root / "source"))
    damage(source)
    scene.refused("convert", source, *WEIGHTS, "--out", scene.root / "out", says=sentence)


class Trace:
    """An object whose pickle makes a directory where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def pickled(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Trace(str(source.parent.parent / "canary"))))


EVALUATED: list[tuple[Damage, str]] = [
    (pickled, "holds pickled weights"),
    (config(num_local_experts=10**9), f"num_local_experts {10**9}"),
    (config(intermediate_size=2**30), "missing or misshapen"),
    (written("tokenizer.json", "null"), "the tokenizer of"),
    (written("tokenizer.json", DEEP), "the tokenizer of"),
    (written("tokenizer_config.json", '{"tokenizer_class": 7}'), "the tokenizer of"),
    (written("kvfold.json", DEEP), "kvfold.json"),
    (written("kvfold.json", '{"schema": 1, "parents": []}'), "kvfold.json is damaged"),
]


@pytest.mark.parametrize(("damage", "sentence"), EVALUATED)
def test_an_evaluation_refuses_it(scene: Scene, damage: Damage, sentence: str) -> None:
    source = Path(shutil.copytree(DEMO, scene.root / "source"))
    damage(source)
    (scene.root / "text.txt").write_text("a few words of a text " * 40)
    options = ("--text", scene.root / "text.txt", "--window", "8", "--device", "cpu")
    scene.refused("eval", source, *options, says=sentence)


PUBLISHED: list[tuple[str, Damage]] = [
    ("kvfold.json", edited("kvfold.json", lambda record: record.pop("stage"))),
    ("kvfold.json", edited("kvfold.json", lambda record: record.update(source=[]))),
    ("kvfold.json",
     edited("kvfold.json", lambda record: record["cache"]["after"].update(bytes_per_token="9"))),
    ("kvfold.json", edited("kvfold.json", lambda record: record.update(schema=[1]))),
    ("kvfold.json", edited("kvfold.json", lambda record: record["source"].update(name="\ud800"))),
    ("kvfold.json", written("kvfold.json", DEEP)),
    ("eval.json", written("eval.json", "[]")),
    ("eval.json", written("eval.json", '{"schema": 2}')),
    ("README.md", written("README.md", "---\nmodel-index: [7]\n---\n# x\n")),
    ("README.md", written("README.md", "---\ntags: [{a: 1}]\n---\n# x\n")),
]  # fmt: skip


@pytest.mark.parametrize(("file", "damage"), PUBLISHED)
def test_a_damaged_record_or_card_is_named(scene: Scene, fold: Path, file: str, damage: Damage) -> None:
    damage(fold)
    scene.refused("publish", fold, "org/x", "--dry-run", "--verify", "lint", says=file)


def outside(path: Path) -> None:
    secret = path.parent.parent / "secret.key"
    secret.write_text(SECRET)
    path.symlink_to("../secret.key")


def large(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**28 + 1)  # no byte of it is stored


KINDS: dict[str, Callable[[Path], object]] = {
    "outside": outside, "zeros": lambda path: path.symlink_to("/dev/zero"),
    "circle": lambda path: path.symlink_to(path.name), "pipe": os.mkfifo, "large": large,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "README.md"])
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
    run_main("convert", snapshot, *WEIGHTS, "--out", out)
    assert (out / "LICENSE").read_text() == "My terms"
    assert not (out / "LICENSE").is_symlink()


def test_nobody_is_asked_about_its_code(scene: Scene, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks on a terminal unless it is told that code is not trusted."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    (source / "evil.py").write_text(f"open({str(scene.canary)!r}, 'w')\nclass Evil: pass\n")
    parts = {"text_config": {"num_hidden_layers": 2}, "vision_config": {}}
    config(model_type="evil_vl", auto_map={"AutoConfig": "evil.Evil"}, **parts)(source)
    scene.refused("convert", source, *WEIGHTS, "--out", scene.root / "out")
    assert not asked


KERNELS: dict[str, Any] = {
    "name": {"attn_implementation": "org/evil"},
    "internal name": {"_attn_implementation_internal": "org/evil@main:attend"},
    "inside": {"text_config": {"_attn_implementation": "org/evil"}},
    "experts": {"_experts_implementation": "org/evil"},
    "another file": {"configuration_files": ["config.4.0.0.json"]},
}


@pytest.mark.parametrize("case", KERNELS)
def test_no_kernel_is_loaded(scene: Scene, source: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """transformers would download and import a kernel that a config.json names, if `kernels` is installed."""
    from transformers import modeling_utils

    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *_, **__: scene.canary.touch())
    (source / "config.4.0.0.json").write_text('{"model_type": "llama", "_attn_implementation": "org/evil"}')
    config(**KERNELS[case])(source)
    for words in (
        ["convert", source, *WEIGHTS, "--out", scene.root / "out"],
        ["eval", source, "--text", "stdlib"],
        ["plan", source, "--calibration", "none"],
    ):
        scene.refused(*words, says="; remove the field")
    for words in (["verify", source], ["publish", source, "org/x", "--dry-run"]):
        scene.refused(*words)


def published(fold: Path) -> dict[str, Any]:
    done = run_main("publish", fold, "org/x", "--dry-run", "--json", "--verify", "lint")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_only_what_a_checkpoint_consists_of_is_published(scene: Scene, fold: Path) -> None:
    usual = set(published(fold)["files"])
    outside(fold / "LICENSE")
    KINDS["zeros"](fold / "NOTICE")
    os.mkfifo(fold / "pipe.json")
    (fold / "notes.txt").symlink_to("/etc/passwd")
    (fold / "hf_token.json").write_text('"hf_secret"')
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
    assert set(told["left_out"]) == {
        "LICENSE", "NOTICE", "pipe.json", "notes.txt", "hf_token.json", "optimizer.pt",
        "adapter.safetensors", ".env", ".git/", "wandb/", "pictures/", "etc/",
    }  # fmt: skip
    assert SECRET not in json.dumps(told)


def test_the_code_of_an_output_is_published_if_it_is_kvfolds(scene: Scene, source: Path) -> None:
    out = scene.root / "out"
    words = ("--to", "mla", "--kv-budget", "50%", "--container", "remote", "--calibration", "none")
    assert CliRunner().invoke(main, ["convert", str(source), *words, "--out", str(out)]).exit_code == 0
    assert {path.name for path in out.glob("*.py")} <= set(published(out)["files"])
    (out / "modeling_kvfold.py").write_text(f"open({str(scene.canary)!r}, 'w')")
    done = CliRunner().invoke(main, ["publish", str(out), "org/x", "--dry-run", "--verify", "lint"])
    assert done.exit_code in (2, 3)
    assert "code" in done.stderr
    assert not scene.canary.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "kvfold.json"])
def test_needed_files_that_are_elsewhere_are_not_published(scene: Scene, fold: Path, name: str) -> None:
    (fold / name).rename(scene.root / "elsewhere")
    (fold / name).symlink_to("../elsewhere")
    scene.refused("publish", fold, "org/x", "--dry-run", "--verify", "lint", says=name)


@pytest.mark.parametrize("name", ["[bold]x[bold]", "a\x1b[31mb", "a\nb", "ä漢"])
def test_names_are_shown_as_text(scene: Scene, fold: Path, name: str) -> None:
    place = fold.rename(scene.root / name)
    done = run_main("verify", place, "--lint")
    assert "\x1b" not in done.stdout
    if name.isprintable():
        assert name in done.stdout.replace("\n", "")
    (place / "config.json").write_text("{")
    scene.refused("verify", place, "--lint")


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes")
def test_names_that_are_not_utf_8(scene: Scene, source: Path) -> None:
    place = source.rename(scene.root / os.fsdecode(b"a\xff"))
    scene.refused("convert", place, *WEIGHTS, "--out", scene.root / "out", says="UTF-8")


def test_tables_of_positions_are_bounded(scene: Scene) -> None:
    source = make(scene.root / "source", "gptj")
    config(n_positions=2**31 - 1, max_position_embeddings=2**31 - 1)(source)
    scene.refused(
        "convert", source, *GQA[:1], "mqa", "--calibration", "none", "--dry-run", says="computes tables of"
    )


def test_weights_that_the_class_ignores_are_kept_and_named(scene: Scene, source: Path) -> None:
    out = scene.root / "out"
    weights(lambda tensors: tensors.update({"score.weight": torch.ones(3, 32)}))(source)
    done = run_main("convert", source, *WEIGHTS, "--out", out)
    assert "1 weights outside its layers that a LlamaForCausalLM ignores, e.g. score.weight" in done.stderr
    assert torch.equal(load_file(out / "model.safetensors")["score.weight"], torch.ones(3, 32))


@pytest.mark.parametrize("value", [None, []])
def test_an_output_names_its_class(scene: Scene, source: Path, value: Any) -> None:
    config(architectures=value)(source)
    run_main("convert", source, *WEIGHTS, "--out", scene.root / "out")
    found = json.loads((scene.root / "out" / "config.json").read_text())
    assert found["architectures"] == ["LlamaForCausalLM"]
