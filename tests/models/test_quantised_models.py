"""A quantised checkpoint computes what its dequantised twin does, wherever it is read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvfold
from kvfold.checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, open_checkpoint
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load, load_model
from kvfold.models.dequantised import LazyWeights
from kvfold.models.layered_model import LayeredModel
from kvfold.models.load_options import LoadOptions

from ..support.commands import run_main
from ..support.quantised import FORMATS, quantise
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 8, "vocab_size": 258}
NAMES = ("fp8 blocks", "mxfp4", "compressed int4", "gptq", "bitsandbytes nf4", "modelopt nvfp4")
TOKENS = torch.arange(24)[None] * 7 % 258


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for family in ("llama", "gpt_oss"):
        make(place / family, family, **SIZES)
        save_tokenizer(place / family)
    for name in NAMES:
        quantise(place / FORMATS[name].family, place / name, FORMATS[name])
    return place


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_twins(name: str, place: Path) -> None:
    source, twin = place / name, place / f"{name}-twin"
    options = LoadOptions(device="cpu", dtype="float32")
    loaded = load(source, options)
    assert getattr(loaded.model.config, "quantization_config", None) is None
    expected = logits(load(twin, options).model)
    assert torch.equal(logits(loaded.model), expected)
    layered = LayeredModel(open_checkpoint(source))
    with layered.streamed(kept=1) as model:
        assert torch.equal(logits(model), logits(load_model(twin)))


def test_half_precision_is_that_of_the_twin_in_half_precision(place: Path) -> None:
    options = LoadOptions(device="cpu", dtype="bfloat16")
    ours, its = (load(place / name, options).model for name in ("gptq", "gptq-twin"))
    assert ours.dtype == its.dtype == torch.bfloat16
    assert torch.equal(logits(ours), logits(its))


@pytest.mark.parametrize("layerwise", [False, True])
def test_statistics_are_the_twins(layerwise: bool, place: Path) -> None:
    taken = [
        study(open_source(place / name), "self", sequences=2, length=16, seed=0, layerwise=layerwise)
        for name in ("compressed int4", "compressed int4-twin")
    ]
    ours, its = (found for found in taken if found is not None)
    for mine, theirs in zip(ours.layers, its.layers, strict=True):
        assert torch.equal(mine.input_BTD, theirs.input_BTD)


@pytest.mark.usefixtures("warm_probe")
def test_a_calibrated_fold_is_the_twins_and_is_evaluated_and_verified(place: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"calibration": "self", "sequences": 2, "length": 16, "refine": 2}
    target = kvfold.MLA(rank=24, rope_dim=4)
    for name, dtype in (("fp8 blocks", None), ("fp8 blocks-twin", "bfloat16")):
        kvfold.fold(place / name, target, out=tmp_path / name, dtype=dtype, container="stock", **options)
    ours, its = (load_file(tmp_path / n / "model.safetensors") for n in ("fp8 blocks", "fp8 blocks-twin"))
    assert all(torch.equal(ours[name], its[name]) for name in its if "self_attn" in name)
    (tmp_path / "text.txt").write_text("key value cache head fold " * 40)
    arguments = [str(tmp_path / "fp8 blocks"), "--text", str(tmp_path / "text.txt"), "--device", "cpu"]
    run_main("eval", *arguments, "--teacher", place / "fp8 blocks")
    report = kvfold.verify(tmp_path / "fp8 blocks")
    assert not report.failures
    assert any(check.name == "source" for check in report.checks)
    assert any("dequantised" in sentence for sentence in report.unasked)


def test_a_damaged_weight_is_one_sentence_in_every_load(place: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "damaged"
    shutil.copytree(place / "fp8 blocks", source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3, 3] = 0x7F  # NaN of E4M3
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    sentence = r"up_proj\.weight of .*damaged holds NaN or infinite values"
    with pytest.raises(InvalidInput, match=sentence):
        load(source, LoadOptions(device="cpu"))
    with pytest.raises(InvalidInput, match=sentence), LayeredModel(open_checkpoint(source)).block(0):
        pass


def test_weights_are_read_when_they_are_needed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    checkpoint = open_checkpoint(place / "gptq")
    assert isinstance(checkpoint, QuantisedCheckpoint)
    original = QuantisedCheckpoint.read
    monkeypatch.setattr(
        QuantisedCheckpoint,
        "read",
        lambda self, name, dtype: (read.append(name), original(self, name, dtype))[1],
    )
    lazy = LazyWeights(checkpoint, torch.bfloat16).state_dict()
    assert not read
    name = "model.layers.1.mlp.up_proj.weight"
    assert lazy[name][...].dtype == torch.bfloat16
    assert read == [name]


@pytest.mark.parametrize(("name", "package"), [
    ("fp8 blocks", None),
    ("mxfp4", None),
    ("compressed fp8", "compressed_tensors"),
    ("compressed fp8 blocks", "compressed_tensors"),
    ("compressed int8", "compressed_tensors"),
    ("compressed int4", "compressed_tensors"),
    ("compressed nvfp4", "compressed_tensors"),
    ("compressed mxfp4", "compressed_tensors"),
    ("bitsandbytes int8", "bitsandbytes"),
])  # fmt: skip
def test_transformers_loads_the_fold_by_its_reader(name: str, package: str | None, tmp_path: Path) -> None:
    """Its logits are those of the fold that `--dequantize` writes, apart from rounding to bfloat16."""
    if package is not None:
        pytest.importorskip(package, reason=f"transformers reads {name} with the package {package}")
    form = FORMATS[name]
    bfloat16 = {**SIZES, "dtype": torch.bfloat16}
    source = quantise(make(tmp_path / "source", form.family, **bfloat16), tmp_path / "q", form)
    target = kvfold.GQA(kv_heads=4) if form.family == "gpt_oss" else kvfold.MLA(rank=24, rope_dim=4)
    options: dict[str, Any] = {"calibration": "none", "verify": "none"}
    if form.family != "gpt_oss":
        options["container"] = "stock"
    kvfold.fold(source, target, out=tmp_path / "out", **options)
    kvfold.fold(source, target, out=tmp_path / "plain", dequantize=True, **options)
    found = [
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / place, dtype=torch.bfloat16))
        for place in ("out", "plain")
    ]
    assert (found[0] - found[1]).abs().max() <= 0.01 * found[1].abs().max()


def test_bitsandbytes_own_checkpoint_is_read_as_it_dequantises(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="it quantises and dequantises on a CPU")
    from transformers import BitsAndBytesConfig

    source = make(tmp_path / "source", **{**SIZES, "dtype": torch.bfloat16})
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=settings, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    checkpoint = open_checkpoint(tmp_path / "saved")
    for number in range(2):
        module = model.get_submodule(f"model.layers.{number}.mlp.up_proj")
        module.quant_state.dtype = torch.float32
        expected = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.quant_state)
        assert torch.equal(checkpoint[f"model.layers.{number}.mlp.up_proj.weight"], expected)
