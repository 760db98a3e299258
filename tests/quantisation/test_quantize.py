"""`kvfold quantize`: what is rounded and what keeps its bytes, who reads the output, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvfold
from kvfold.checkpoints import directory as checkpoint_files
from kvfold.checkpoints.directory import Checkpoint
from kvfold.checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from kvfold.checkpoints.record import folded_parent, read_record
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load
from kvfold.models.code_files import foreign_code
from kvfold.models.load_options import LoadOptions
from kvfold.models.remote_code import AUTO_MAP
from kvfold.quantisation import quantize
from kvfold.quantisation.quantize import plan_quantize
from kvfold.quantisation.request import SCHEMES
from kvfold.quantisation.weight_rounding import rounding

from ..support.commands import run_main
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer

pytest.importorskip("compressed_tensors", reason="`kvfold quantize` rounds with compressed-tensors")

# Groups of 32 divide these widths, groups of 64 do not divide 160.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 8, "vocab_size": 258}
TOKENS = torch.arange(24)[None] * 7 % 258
FOLDS: dict[str, dict[str, Any]] = {
    "gqa": {"target": kvfold.GQA(kv_heads=4)},
    "stock": {"target": kvfold.MLA(rank=32, rope_dim=8), "container": "stock"},
    "decoupled": {"target": kvfold.MLA(rank=32, rope_dim=8), "container": "remote"},
    "intact": {"target": kvfold.MLA(rank=32, rope="intact"), "container": "remote"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and folds of it, in bfloat16."""
    place = tmp_path_factory.mktemp("quantize")
    source = make(place / "source", dtype=torch.bfloat16, **SIZES)
    save_tokenizer(source)
    for name, options in FOLDS.items():
        kvfold.fold(source, **options, out=place / name, calibration="none", verify="none")
    return place


def command(*words: str | Path, code: int | None = None) -> Result:
    return run_main("quantize", *words, code=code)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=TOKENS, use_cache=False).logits.float()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", FOLDS)
def test_weights_alone_are_rounded(scheme: str, name: str, place: Path, tmp_path: Path) -> None:
    kvfold.quantize(place / name, scheme, out=tmp_path / "out")
    plain, rounded = Checkpoint(place / name), QuantisedCheckpoint(tmp_path / "out")
    assert set(rounded) == set(plain)
    assert {key for key in rounded.packed if "mlp" not in key} == {
        key for key in plain if key.split(".")[-2] in {"q_proj", "k_proj", "v_proj", "o_proj"}
    }
    for key in plain:
        exact, found = plain[key].float(), rounded[key].float()
        if key not in rounded.packed:
            assert torch.equal(plain[key], rounded[key])
            continue
        width = 32 if scheme == "w4a16" else exact.shape[1]
        most = exact.unflatten(1, (-1, width)).abs().amax(-1, keepdim=True)
        # Half a step of 15, of 255, and of the three bits of E4M3; the scale is rounded to bfloat16.
        bound = {"w4a16": 1 / 15, "w8a8": 1 / 255, "fp8": 1 / 28}[scheme] + 2**-8
        assert ((found - exact).unflatten(1, (-1, width)).abs() <= bound * most).all(), key
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (place / name / file).read_bytes()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_below_float16_lose_no_row(scheme: str) -> None:
    """A row that is nearly dead has a scale that float16 rounds to zero, or by a third."""
    made = rounding(scheme, 32 if SCHEMES[scheme].grouped else None)
    most_R1 = torch.logspace(-7, -3, 41)[:, None]
    rows_RC = (most_R1 * torch.linspace(-1, 1, 64)).half().float()
    parts = made.parts(rows_RC, torch.float16)
    scale_RG = parts["weight_scale"].float()
    largest = {"fp8": 448, "w8a8": 127.5, "w4a16": 7.5}[scheme]
    assert (scale_RG > 0).all()
    assert (
        scale_RG * largest * (1 + 2**-11) >= rows_RC.unflatten(1, (scale_RG.shape[1], -1)).abs().amax(-1)
    ).all()
    if scheme != "w4a16":
        half_step = {"w8a8": 0.5, "fp8": 16}[scheme]
        error_RC = parts["weight"].float() * scale_RG - rows_RC
        assert (error_RC.abs() <= half_step * scale_RG * (1 + 2**-10)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["gqa", "stock"])
def test_transformers_reads_what_kvfold_reads(scheme: str, name: str, place: Path, tmp_path: Path) -> None:
    """With 8-bit activations its logits differ by their rounding; its weights are the same bytes."""
    out = kvfold.quantize(place / name, scheme, out=tmp_path / "out").directory
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours = load(out, LoadOptions(device="cpu", dtype="float32")).model
    expected, found = logits(ours), logits(theirs)
    assert (found - expected).std() <= (1e-4 if scheme == "w4a16" else 0.1) * expected.std()
    inside = dict(theirs.named_modules())
    for key, tensor in QuantisedCheckpoint(out).items():
        module = inside[key.removesuffix(".weight")]
        assert torch.allclose(module.weight.float(), tensor.float(), rtol=1e-2, atol=1e-6), key


def test_the_list_of_unquantised_modules_is_complete(place: Path, tmp_path: Path) -> None:
    """An engine quantises every linear module that the list does not name."""
    for name in FOLDS:
        kvfold.quantize(place / name, "fp8", out=tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        model = load(place / name, LoadOptions(device="cpu")).model
        linear = {key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        packed = {key.removesuffix(".weight") for key in QuantisedCheckpoint(tmp_path / name).packed}
        assert set(config["ignore"]) == linear - packed
        kinds = {key.split(".")[-1] for key in config["ignore"]}
        latent = {"stock": "kv_a_proj_with_mqa", "decoupled": "kv_a_proj_with_mqa", "intact": "kv_a_proj"}
        assert kinds == ({"lm_head", latent[name], "kv_b_proj"} if name in latent else {"lm_head"})


def test_groups_that_do_not_divide_leave_a_weight(place: Path, tmp_path: Path) -> None:
    plan = plan_quantize(place / "gqa", "w4a16", tmp_path / "out", group=64)
    left = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert plan.chosen.left == {"groups of 64 do not divide their width": tuple(left)}
    assert set(left) < set(plan.chosen.ignore)
    assert plan_quantize(place / "gqa", "w4a16", tmp_path / "out").chosen.group == 32


@pytest.mark.parametrize(("family", "width"), [("mixtral", 64), ("qwen3_moe", 48)])
def test_experts_have_one_scheme_and_routers_none(family: str, width: int, tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": width, "moe_intermediate_size": width}
    source = make(tmp_path / "source", family, **sizes)
    chosen = plan_quantize(source, "w4a16", tmp_path / "out").chosen
    experts = [name for name in Checkpoint(source) if ".experts." in name]
    assert experts
    rounded = [name for name in experts if name in chosen.rounded]
    assert rounded == (experts if width % 32 == 0 else [])
    assert any(name.endswith(".gate") for name in chosen.ignore)
    assert all(".self_attn." in name or ".experts." in name for name in chosen.rounded)


def test_pieces_give_the_same_bytes(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "pieces"):
        kvfold.quantize(place / "stock", "w4a16", out=tmp_path / name)
        monkeypatch.setattr(checkpoint_files, "PIECE", 300)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "pieces")]
    assert files[0] == files[1]


def test_several_shards(place: Path, tmp_path: Path) -> None:
    assert (
        command(
            place / "gqa", "--scheme", "w8a8", "--out", tmp_path / "out", "--shard-size", "40KB"
        ).exit_code
        == 0
    )
    assert len(QuantisedCheckpoint(tmp_path / "out").files) > 1
    again = kvfold.quantize(place / "gqa", "w8a8", out=tmp_path / "again", shard_size="40KB").directory
    assert len(QuantisedCheckpoint(again).files) == len(QuantisedCheckpoint(tmp_path / "out").files)


def test_names_of_foreign_code_are_left_out(place: Path, tmp_path: Path) -> None:
    """An output with code of its own names kvfold's."""
    for name, wanted in (("gqa", None), ("intact", AUTO_MAP)):
        named = Path(shutil.copytree(place / name, tmp_path / name))
        config = json.loads((named / "config.json").read_text())
        config |= {"auto_map": {"AutoModelForCausalLM": "evil/repo--modeling.Evil"}}
        (named / "config.json").write_text(json.dumps(config))
        out = kvfold.quantize(named, "fp8", out=tmp_path / f"{name}-out").directory
        assert json.loads((out / "config.json").read_text()).get("auto_map") == wanted
        assert foreign_code(out) == ""


@pytest.mark.usefixtures("warm_probe")
def test_the_other_commands_take_the_output(place: Path, tmp_path: Path) -> None:
    """The record has the source as teacher and the fold as parent; evaluation, check and card follow it."""
    out = tmp_path / "out"
    result = command(place / "decoupled", "--scheme", "w4a16", "--out", out, code=0)
    assert f"Next: kvfold eval {out} --teacher {place / 'decoupled'} --text FILE" in result.output
    record = read_record(out)
    assert (record["stage"], record["quantize"]["group_size"]) == ("quantize", 32)
    assert [parent["stage"] for parent in record["parents"]] == ["source", "convert"]
    assert folded_parent(out) is None  # nothing was distilled
    found = kvfold.evaluate(out, text="stdlib", window=32, max_windows=2, device="cpu")
    assert found["kl.mean"] is not None
    assert kvfold.verify(out).failures == []
    card = kvfold.publish(out, "me/out", verify="lint", dry_run=True).card
    assert "Its linear weights are in W4A16" in card
    assert "--out decoupled\n$ kvfold quantize decoupled --scheme w4a16 --group-size 32 --out out\n" in card


@pytest.mark.parametrize(("trained", "form"), [
    ("all", ""),
    ("attention", " Its linear weights are in FP8, but for those that were trained afterwards."),
])  # fmt: skip
def test_the_card_of_a_rounded_fold_that_was_distilled_says_what_its_weights_are(
    place: Path, tmp_path: Path, trained: str, form: str
) -> None:
    rounded = kvfold.quantize(place / "gqa", "fp8", out=tmp_path / "rounded").directory
    settings = {
        "data.source": "stdlib", "data.seq_len": 16, "stages.0.tokens": 64, "stages.0.train": trained,
        "output": str(tmp_path / "out"),
    }  # fmt: skip
    out = kvfold.train(rounded, settings=settings).directory
    card = (out / "README.md").read_text()
    assert f"converted and distilled against it.{form}\n" in card
    assert ("- fp8\n" in card) == bool(form)
    quantized = "$ kvfold quantize gqa --scheme fp8 --out rounded\n"
    assert f"--out gqa\n{quantized}$ kvfold distill recipe.yaml\n" in card


def test_an_unfolded_checkpoint_is_its_own_source(place: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in (place / "source").iterdir()}
    record = kvfold.quantize(place / "source", "fp8", out=tmp_path / "out").record
    assert record["source"]["path"] == str(place / "source")
    assert "with weights in FP8" in (tmp_path / "out" / "README.md").read_text()
    assert kvfold.evaluate(tmp_path / "out", text="stdlib", window=32, max_windows=2)["kl.mean"] is not None
    assert {path.name: path.read_bytes() for path in (place / "source").iterdir()} == before


def test_a_source_with_rounded_weights_can_be_folded_and_a_fold_cannot(place: Path, tmp_path: Path) -> None:
    kvfold.quantize(place / "source", "fp8", out=tmp_path / "source")
    folded = kvfold.fold(
        tmp_path / "source", kvfold.GQA(kv_heads=4), out=tmp_path / "out", calibration="none"
    )
    assert folded.record["source"]["path"] == str(tmp_path / "source")
    kvfold.quantize(place / "gqa", "fp8", out=tmp_path / "fold")
    with pytest.raises(InvalidInput, match="already folded by kvfold"):
        kvfold.fold(tmp_path / "fold", kvfold.MQA(), out=tmp_path / "again", calibration="none")


def test_a_dry_run_states_the_bytes_and_writes_nothing(place: Path, tmp_path: Path) -> None:
    words = [place / "stock", "--scheme", "w4a16", "--out", tmp_path / "out", "--json"]
    planned = json.loads(command(*words, "--dry-run").stdout)
    assert not (tmp_path / "out").exists()
    done = json.loads(command(*words).stdout)["quantize"]
    assert done == {"command": done["command"]} | {key: planned[key] for key in planned if key != "out"}
    stored = Checkpoint(tmp_path / "out", packed=True)
    assert sum(stored.spec(name).nbytes for name in stored) == planned["bytes_after"]


def test_a_failure_leaves_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvfold.quantisation.quantize.write_record", fail)
    result = command(place / "stock", "--scheme", "w8a8", "--out", tmp_path / "out", code=2)
    assert "out.partial cannot be written: No space left on device; make room there" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_changing_source_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shutil.copytree(place / "gqa", tmp_path / "source")
    copy = quantize.copy_side_files

    def replacing(*directories: Path) -> None:
        shutil.copyfile(place / "stock" / "model.safetensors", source / "model.safetensors")
        copy(*directories)

    monkeypatch.setattr(quantize, "copy_side_files", replacing)
    done = command(source, "--scheme", "fp8", "--out", tmp_path / "out", code=2)
    assert "model.safetensors changed while it was read; run the same command again" in done.stderr
    assert not (tmp_path / "out").exists()


def test_unusable_requests_are_one_sentence(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kvfold.quantize(place / "gqa", "w8a8", out=out)
    cases = {
        ("gqa", "int3", None): "scheme is 'int3'; it should be 'fp8', 'w4a16' or 'w8a8'",
        ("gqa", "fp8", 32): "group_size has no effect on scheme fp8",
        ("gqa", "w4a16", 48): "groups of 48 divide no width .*widths 64, 160.*; use group_size 64, 32, or",
        ("gqa", "w4a16", 4): "group_size is 4; it should be greater than or equal to 8",
        ("nothing", "fp8", None): "nothing is not a directory",
    }
    for (name, scheme, group), sentence in cases.items():
        with pytest.raises(InvalidInput, match=sentence):
            kvfold.quantize(place / name, scheme, out=tmp_path / "other", group_size=group)
    rounded = kvfold.quantize(place / "source", "fp8", out=tmp_path / "rounded").directory
    for directory, end in (out, "made of"), (rounded, "made of, or fold it with kvfold convert --dequantize"):
        with pytest.raises(InvalidInput, match=f"is quantised already; quantise the .* that it was {end}$"):
            kvfold.quantize(directory, "w8a8", out=tmp_path / "other")
    with pytest.raises(InvalidInput, match="exists and nothing is overwritten"):
        kvfold.quantize(place / "gqa", "w8a8", out=out)
    with pytest.raises(InvalidInput, match="is inside the source"):
        kvfold.quantize(place / "gqa", "w8a8", out=place / "gqa" / "inside")
    make(tmp_path / "gpt2", "gpt2", vocab_size=258)
    with pytest.raises(InvalidInput, match="no linear module in its layers"):
        kvfold.quantize(tmp_path / "gpt2", "w8a8", out=tmp_path / "other")
    shutil.copytree(place / "gqa", tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    with pytest.raises(InvalidInput, match="is truncated"):
        kvfold.quantize(tmp_path / "damaged", "w8a8", out=tmp_path / "other")


def test_a_missing_package_has_an_extra(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.quantisation.weight_rounding.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'kvfold\[quantize\]'"):
        kvfold.quantize(place / "gqa", "w8a8", out=tmp_path / "out")
