"""`kvfold assemble`: a folded or distilled text tower, put back into its multimodal checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

import kvfold
from kvfold import GQA, MLA
from kvfold.cli import main
from kvfold.core.errors import InvalidInput

from ...support.commands import run_main
from ...support.tiny import make
from ...support.tokenizers import save_tokenizer
from ...support.towers import TOWERS, make_multimodal

KINDS = ("llava", "qwen3_vl", "gemma4")
TARGETS = {"gqa": GQA(kv_heads=1), "mla": MLA(rank=4, rope_dim=4)}


def logits(directory: Path, kind: str) -> Tensor:
    """Return logits of a text with an image in it."""
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        out: Tensor = model(**TOWERS[kind][1]()).logits
    return out


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a source with a tokenizer; next to it, its tower folded to GQA."""
    source = make_multimodal(tmp_path_factory.mktemp("models") / "llava", "llava", vocab_size=258)
    save_tokenizer(source, bos="<s>")
    alone(source, "gqa")
    return source


def alone(source: Path, target: str, **options: Any) -> Path:
    out = source.with_name(f"{source.name}-{target}")
    kvfold.fold(source, TARGETS[target], out=out, calibration="none", text_only=True, **options)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_put_back_is_the_fold_in_its_place(kind: str, tmp_path: Path) -> None:
    """The same weights, bytes and logits with an image as of a fold in one go."""
    source = make_multimodal(tmp_path / kind, kind)
    (source / "video_preprocessor_config.json").write_text('{"auto_map": {"a": "b.c"}, "fps": 3}')
    for target in ("gqa", "mla") if kind == "llava" else ("gqa",):
        tower = alone(source, target, **({"container": "stock"} if target == "mla" else {}))
        in_place = tmp_path / f"{target}-place"
        kvfold.fold(source, TARGETS[target], out=in_place, calibration="none")
        out = kvfold.assemble(tower, source, out=tmp_path / f"{target}-assembled")
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (out / name).read_bytes() == (in_place / name).read_bytes(), name
        assert torch.equal(logits(out, kind), logits(in_place, kind))
        for directory in (out, in_place):
            assert json.loads((directory / "video_preprocessor_config.json").read_text()) == {"fps": 3}
        record = json.loads((out / "kvfold.json").read_text())
        assert record["source"]["path"] == str(source.resolve())
        assert [parent["stage"] for parent in record["parents"]] == ["source", "convert"]
        commands = f" --out {tower.name}\n$ kvfold assemble {tower.name} {source.name}\n"
        assert commands in (out / "README.md").read_text()


@pytest.mark.usefixtures("warm_probe")
def test_a_distilled_tower_is_put_back(llava: Path, tmp_path: Path) -> None:
    """The output is trained: it is evaluated with its source and what it was trained from, and verified."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + n * n % 23) for n in range(4000)))
    tower = llava.with_name("llava-gqa")
    weights = load_file(tower / "model.safetensors")
    hurt = tmp_path / "hurt"
    shutil.copytree(tower, hurt)
    noise = torch.Generator().manual_seed(0)
    save_file(
        {name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) for name, tensor in weights.items()},
        hurt / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    recipe = {
        "schema": 1, "student": str(hurt), "output": str(tmp_path / "trained"),
        "data": {"source": str(text), "seq_len": 32},
        "stages": [{"name": "all", "tokens": 640, "batch_tokens": 64, "lr": 1e-3}],
    }  # fmt: skip
    trained = kvfold.train(recipe).directory
    out = kvfold.assemble(trained, llava, out=tmp_path / "whole")
    found = kvfold.evaluate(out, text=text, suites=["ppl", "fidelity"], window=32, max_windows=8)
    tower_alone = kvfold.evaluate(trained, text=text, suites=["ppl", "fidelity"], window=32, max_windows=8)
    assert found["kl.mean"] == pytest.approx(tower_alone["kl.mean"], rel=1e-4)
    assert found["kl.mean"] > 1e-6
    assert not kvfold.verify(out).failures
    card = (out / "README.md").read_text()
    assert "distilled against it" in card
    assert f" --out hurt\n$ kvfold distill recipe.yaml\n$ kvfold assemble trained {llava.name}\n" in card


def test_what_stays_multimodal_is_neither_trained_nor_rounded(llava: Path, tmp_path: Path) -> None:
    """`kvfold convert` suggests the tower alone for training, and `kvfold quantize` refuses in one sentence."""
    words = ["convert", str(llava), "--to", "mqa", "--calibration", "none", "--out", str(tmp_path / "out")]
    assert "or train its text tower: kvfold convert --text-only, then" in run_main(*words).stdout
    pytest.importorskip("compressed_tensors")
    with pytest.raises(InvalidInput, match=r"is a multimodal checkpoint, which .* does not round"):
        kvfold.quantize(tmp_path / "out", "fp8", out=tmp_path / "rounded")


def test_the_command_names_what_it_wrote(llava: Path, tmp_path: Path) -> None:
    words = ["assemble", str(llava.with_name("llava-gqa")), str(llava), "--out"]
    assert f"Next: kvfold eval {tmp_path / 'text'} --text FILE" in run_main(*words, tmp_path / "text").stdout
    as_json = CliRunner().invoke(main, [*words, str(tmp_path / "json"), "--json"])
    assert json.loads(as_json.stdout)["assemble"]["command"].startswith("kvfold assemble ")
    assert "nothing is overwritten" in run_main(*words, tmp_path / "json", code=2).stderr


def change(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_does_not_fit_is_refused(llava: Path, tmp_path: Path) -> None:
    """One sentence for each, and nothing is written."""
    tower, out = llava.with_name("llava-gqa"), tmp_path / "out"

    def refusal(tower: Path, whole: Path) -> str:
        with pytest.raises(InvalidInput) as caught:
            kvfold.assemble(tower, whole, out=out)
        assert not out.exists()
        return str(caught.value)

    text = make(tmp_path / "text", "llama")
    assert refusal(tower, text) == (
        f"{text} is not a multimodal checkpoint; name the one that the tower was taken from"
    )
    assert refusal(tmp_path / "none", llava).endswith(
        "is not a directory; name that of the folded text tower"
    )
    assert "is no fold of kvfold" in refusal(text, llava)
    whole = kvfold.assemble(tower, llava, out=tmp_path / "whole")
    assert "is a whole multimodal checkpoint already" in refusal(whole, llava)
    assert "has code of its own" in refusal(alone(llava, "mla", container="remote"), llava)
    other = make_multimodal(tmp_path / "mistral3", "mistral3")
    assert "is of model_type llama, which has no place in" in refusal(tower, other)
    wide = make_multimodal(tmp_path / "wide", "llava", vocab_size=97)
    assert f"has vocab_size 258, but the text tower of {wide} has 97" in refusal(tower, wide)
    twin = tmp_path / "twin"
    shutil.copytree(llava, twin)
    weights = load_file(twin / "model.safetensors")
    save_file(
        {name: 2 * each for name, each in weights.items()}, twin / "model.safetensors", {"format": "pt"}
    )
    assert refusal(tower, twin).endswith(f"which is not the text tower of {twin}")
    half = tmp_path / "half"
    shutil.copytree(tower, half)
    save_file(
        {name: each.half() for name, each in load_file(tower / "model.safetensors").items()},
        half / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    assert f"{half} is in float16, but the text tower of {llava} is in float32" in refusal(half, llava)


def test_nothing_is_written_into_what_is_read(llava: Path) -> None:
    tower = llava.with_name("llava-gqa")
    for place in (llava, tower, llava.with_name("llava-gqa.tower")):
        with pytest.raises(InvalidInput, match="which is never written"):
            kvfold.assemble(tower, llava, out=place / "inside")
        assert not (place / "inside").exists()


@pytest.mark.parametrize(
    "fields", [{"target": {"name": "../../evil"}}, {"target": {"name": "x\ny"}}, {"cache": None}]
)
def test_a_record_does_not_choose_the_place(
    fields: dict[str, Any], llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = edited(llava, tmp_path, **fields)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="is no fold of kvfold"):
        kvfold.assemble(tower, llava)
    assert [path.name for path in tmp_path.iterdir()] == ["tower"]


def edited(llava: Path, place: Path, **fields: Any) -> Path:
    """Return a copy of the folded tower with other fields in its record."""
    tower = place / "tower"
    shutil.copytree(llava.with_name("llava-gqa"), tower)
    record = json.loads((tower / "kvfold.json").read_text())
    (tower / "kvfold.json").write_text(json.dumps(record | fields))
    return tower


def test_outputs_are_named_by_source(llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record and card name the fold as the user asked for it; `~` is the user's home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(llava.parent))
    assert kvfold.assemble("~/llava-gqa", "~/llava") == Path("llava-mqa")
    record = json.loads((tmp_path / "llava-mqa/kvfold.json").read_text())
    assert record["source"]["name"] == "llava"
    asked = "--to gqa --kv-heads 1 --calibration none --method subspace --text-only"
    assert record["command"] == f"kvfold convert '~/llava' {asked}"


def test_a_tower_of_another_transformers_is_taken(llava: Path, tmp_path: Path) -> None:
    """It writes other defaults into config.json; the tensors count."""
    source = tmp_path / "source"
    shutil.copytree(llava.with_name("llava-gqa.tower"), source)
    change(source, transformers_version="4.57.0", a_new_default=1)
    record = json.loads((llava.with_name("llava-gqa") / "kvfold.json").read_text())
    tower = edited(llava, tmp_path, source={**record["source"], "path": str(source)})
    assert kvfold.assemble(tower, llava, out=tmp_path / "out").is_dir()


def test_a_tower_whose_source_is_gone_is_taken_with_a_notice(
    llava: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = json.loads((llava.with_name("llava-gqa") / "kvfold.json").read_text())
    tower = edited(llava, tmp_path, source={**record["source"], "path": str(tmp_path / "gone")})
    assert kvfold.assemble(tower, llava, out=tmp_path / "out").is_dir()
    assert f"whether that was the text tower of {llava} is not checked" in caplog.text
