"""Damaged sources that are no plain Llama: each is refused in one sentence, before any work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..support.quantised import FORMATS, quantise, quantised_tower
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer
from ..support.towers import make_multimodal
from .conftest import Scene, edit_json

Damage = Callable[[Path], object]
GQA = ("--to", "gqa", "--kv-heads", "2", "--calibration", "none")
NAN = float("nan")
QUERY = "model.layers.0.self_attn.q_proj"


def config(**changes: Any) -> Damage:
    """Change fields of config.json; `...` removes one."""

    def damage(source: Path) -> None:
        file = source / "config.json"
        whole = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in whole.items() if value is not ...}))

    return damage


def quantization(**changes: Any) -> Damage:
    """Change fields of the quantization_config."""

    def damage(source: Path) -> None:
        found = json.loads((source / "config.json").read_text())["quantization_config"]
        config(quantization_config={**found, **changes})(source)

    return damage


def text(**changes: Any) -> Damage:
    """Change fields of the text_config."""

    def damage(source: Path) -> None:
        found = json.loads((source / "config.json").read_text())["text_config"]
        config(text_config={**found, **changes})(source)

    return damage


def tensor(ending: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """Change the first tensor with an ending; None removes it."""

    def damage(source: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        text_first = sorted(tensors, key=lambda name: ("vision" in name, name))
        name = next(name for name in text_first if name.endswith(ending))
        changed = change(tensors.pop(name))
        kept = {} if changed is None else {name: changed.contiguous()}
        save_file(tensors | kept, source / "model.safetensors", {"format": "pt"})

    return damage


def gone(_: Tensor) -> None:
    return None


def cut(stored: Tensor) -> Tensor:
    return stored[:-1].clone()


def filled(value: float) -> Callable[[Tensor], Tensor]:
    def change(stored: Tensor) -> Tensor:
        flat = stored.float().flatten()
        flat[0] = value
        return flat.reshape(stored.shape).to(stored.dtype)

    return change


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda stored: stored.to(dtype)


FAMILIES: dict[str, tuple[str, Damage, str]] = {
    "qwen3: no norm of keys": ("qwen3", tensor("0.self_attn.k_norm.weight", gone), "has no model.layers.0"),
    "qwen3: long norm": (
        "qwen3",
        tensor("0.self_attn.q_norm.weight", lambda t: torch.cat([t, t])),
        "has shape (16,), but config.json implies (8,)",
    ),
    "gemma2: soft cap": ("gemma2", config(attn_logit_softcapping=-1.0), "attn_logit_softcapping"),
    "gemma2: kinds of layers": ("gemma2", config(layer_types=["sliding_attention"]), "layer_types"),
    "gemma3: tables": ("gemma3_text", config(rope_parameters={"full_attention": 7}), "full_attention 7"),
    "olmo2: norm of heads": ("olmo2", tensor("0.self_attn.q_norm.weight", cut), "has shape (31,)"),
    "phi3: fused heads": ("phi3", tensor("0.self_attn.qkv_proj.weight", cut), "qkv_proj"),
    "phi3: part that rotates": ("phi3", config(partial_rotary_factor=7), "partial_rotary_factor"),
    "mixtral: experts": ("mixtral", config(num_local_experts=3), "experts"),
    "mixtral: an expert less": ("mixtral", tensor("experts.3.w1.weight", gone), "experts.3.w1.weight"),
    "gpt_neox: fused heads": ("gpt_neox", tensor("query_key_value.weight", cut), "query_key_value"),
    "falcon: heads": ("falcon", config(num_kv_heads=3), "do not share 3"),
    "falcon: layout": ("falcon", config(new_decoder_architecture="x"), "new_decoder_architecture"),
    "qwen3_next: kinds of layers": ("qwen3_next", config(layer_types=["a", "b"]), "layer_types"),
    "qwen3_next: gate": ("qwen3_next", tensor("self_attn.q_proj.weight", cut), "q_proj"),
    "lfm2: kinds of layers": ("lfm2", config(layer_types=["full_attention"] * 2), "layers.0.self_attn"),
    "lfm2: convolution": ("lfm2", tensor("conv.conv.weight", gone), "conv.conv.weight"),
}
QUANTISED: dict[str, tuple[str, Damage, str]] = {
    "fp8: no scale": ("fp8 blocks", tensor(f"{QUERY}.weight_scale_inv", gone), "has no "),
    "fp8: short scales": ("fp8 blocks", tensor(f"{QUERY}.weight_scale_inv", cut), "has shape"),
    "fp8: integer scales": ("fp8 blocks", tensor(f"{QUERY}.weight_scale_inv", cast(torch.int32)), "is int32"),
    "fp8: NaN": ("fp8 blocks", tensor(f"{QUERY}.weight_scale_inv", filled(NAN)), "NaN or infinite"),
    "fp8: block": ("fp8 blocks", quantization(weight_block_size=[16, 0]), "weight_block_size [16, 0]"),
    "fp8: another block": ("fp8 blocks", quantization(weight_block_size=[8, 8]), "has shape"),
    "compressed: no scale": ("compressed int4", tensor(f"{QUERY}.weight_scale", gone), "has no "),
    "compressed: NaN": ("compressed int4", tensor(f"{QUERY}.weight_scale", filled(NAN)), "NaN or infinite"),
    "compressed: packed": ("compressed int4", tensor(f"{QUERY}.weight_packed", cut), "does not hold"),
    "compressed: words": (
        "compressed int4",
        tensor(f"{QUERY}.weight_packed", lambda t: t[:, :-1]),
        "does not hold",
    ),
    "compressed: shape": (
        "compressed int4",
        tensor(f"{QUERY}.weight_shape", lambda t: t * -1),
        "does not hold a weight of shape",
    ),
    "compressed: no shape": ("compressed int4", tensor(f"{QUERY}.weight_shape", gone), "has no "),
    "compressed: groups": ("compressed int4", quantization(config_groups=[]), "config_groups []"),
    "compressed: format": ("compressed int4", quantization(format="x"), "format 'x'"),
    "compressed: whole scale": (
        "compressed nvfp4",
        tensor(f"{QUERY}.weight_global_scale", filled(0.0)),
        "NaN or infinite",
    ),
    "gptq: no zeros": ("gptq", tensor(f"{QUERY}.qzeros", gone), "has no "),
    "gptq: scales": ("gptq", tensor(f"{QUERY}.scales", cut), "has shape"),
    "gptq: infinite": ("gptq", tensor(f"{QUERY}.scales", filled(float("inf"))), "NaN or infinite"),
    "gptq: groups": ("gptq", tensor(f"{QUERY}.g_idx", filled(99)), "holds 99, where numbers from 0 to 1"),
    "gptq: no number": ("gptq", tensor(f"{QUERY}.qweight", gone), "has no "),
    "gptq: words": ("gptq", tensor(f"{QUERY}.qweight", cut), "has shape"),
    "gptq: bits": ("gptq", quantization(bits=3), "has 3 bits"),
    "gptq: group size": ("gptq", quantization(group_size=0), "group_size 0"),
    "awq: zeros": ("awq", tensor(f"{QUERY}.qzeros", cast(torch.int64)), "is int64"),
    "awq: version": ("awq", quantization(version="gemv"), "AWQ version"),
    "awq: scales": ("awq", tensor(f"{QUERY}.scales", lambda t: t.mT), "has shape"),
    "mxfp4: no scales": ("mxfp4", tensor("gate_up_proj_scales", gone), "has no "),
    "mxfp4: NaN": ("mxfp4", tensor("gate_up_proj_scales", filled(255)), "NaN or infinite"),
    "mxfp4: blocks": ("mxfp4", tensor("gate_up_proj_blocks", lambda t: t[..., :-1]), "has shape"),
    "mxfp4: experts": ("mxfp4", tensor("gate_up_proj_blocks", cut), "has shape"),
    "bitsandbytes: state": ("bitsandbytes nf4", tensor("nf4", cut), "quant_state"),
    "modelopt: scale": ("modelopt nvfp4", tensor(f"{QUERY}.weight_scale_2", gone), "has no "),
    "unknown method": (
        "gptq",
        quantization(quant_method="x"),
        "quantised by 'x', which kvfold does not read",
    ),
    "method list": ("awq", quantization(quant_method=["awq"]), "quantised by ['awq']"),
    "no method": ("awq", quantization(quant_method=None), "a quantization_config without quant_method"),
    "lists": ("fp8 blocks", quantization(modules_to_not_convert="lm_head"), "where a list of names"),
}
CONFIGS = {"text": "x", "number": 7, "list": ["x"], "true": True, "fraction": 0.5, "object": {"a": 1}}
EMPTY = {"null": None, "no object": {}, "no list": [], "false": False, "zero": 0, "no text": ""}
TOWERS: dict[str, tuple[Damage, str]] = {
    "no text": (config(text_config=...), ""),
    "list": (config(text_config=[1]), "text_config"),
    "word": (config(text_config="x"), "text_config"),
    "null": (config(text_config=None), ""),
    "kind": (text(model_type="bert"), "bert"),
    "kind list": (text(model_type=[1]), ""),
    "layers": (text(num_hidden_layers=3), "layers.2"),
    "wide": (text(hidden_size=40), ""),
    "heads": (text(num_attention_heads=0), ""),
    "no image part": (config(vision_config={}), "missing or misshapen"),
    "image part list": (config(vision_config=[1]), ""),
    "image tensor": (
        tensor("vision_tower.encoder.layers.0.mlp.fc1.weight", gone),
        "missing or misshapen",
    ),
    "image tensor cut": (tensor("position_embedding.weight", cut), "missing or misshapen"),
    "projector": (tensor("linear_1.weight", lambda t: t.mT), "missing or misshapen"),
    "text tensor": (
        tensor("layers.1.self_attn.k_proj.weight", gone),
        "has no language_model.model.layers.1.self_attn.k_proj.weight, which the text tower of llava has",
    ),
    "text tensor cut": (tensor("layers.1.mlp.up_proj.weight", cut), "up_proj.weight"),
    "place": (config(image_token_id="<image>"), "image_token_id '<image>', where a token id is needed"),
    "kind of the whole": (config(model_type="x"), ""),
    "classes": (text(architectures=7), "text_config.architectures 7, where a list of strings is needed"),
    "classes of the whole": (config(architectures="x"), "architectures 'x', where a list of strings"),
    "quantised": (
        config(quantization_config={"quant_method": "fp8"}),
        "has a quantization_config (fp8), but no quantised weight",
    ),
    "quantised tower": (text(quantization_config={"quant_method": "awq"}), "(awq), but no quantised weight"),
    "no image config": (config(vision_config=...), "has a text_config, but no vision_config"),
    "deep": (lambda source: (source / "config.json").write_text('{"text_config": ' + "[" * 10**5), "deep"),
}


# Of the text tower of a `llava`.
QUANTISED_TOWERS: dict[str, tuple[str, Damage, str]] = {
    "scale": (
        "fp8 blocks", tensor("language_model.model.layers.1.mlp.up_proj.weight_scale_inv", gone),
        "has no language_model.model.layers.1.mlp.up_proj.weight_scale_inv, without which",
    ),
    "scale cut": ("fp8 blocks", tensor("q_proj.weight_scale_inv", cut), "weight_scale_inv"),
    "words cut": ("compressed int4", tensor("o_proj.weight_packed", cut), "weight_packed"),
    "targets": (
        "compressed int4", quantization(config_groups={"g": {"targets": [7, "re:("], "weights": 5}}),
        "with unknown bits",
    ),
    "groups": ("compressed int4", quantization(config_groups=[1]), "config_groups"),
    "list": ("fp8 blocks", quantization(modules_to_not_convert="lm_head"), "where a list of names"),
    "bits": ("gptq", quantization(bits=3), "bits"),
    "dynamic": ("gptq", quantization(dynamic=["x"]), "where an object of patterns"),
    "method": ("awq", quantization(quant_method="hqq"), "quantised by 'hqq', which kvfold does not read"),
    "attention": (
        "awq", tensor("layers.0.self_attn.k_proj.qweight", gone), "layers.0.self_attn.k_proj",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family, a format or `llava` to a sound source, which is made once."""
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
            wide = {"hidden_size": 64} if name == "gpt_neox" else {}  # a quarter of a head rotates: 2 of 8
            return make(directory, name, **wide)
        form = FORMATS[name]
        plain = root / f"plain-{form.family}"
        if not plain.exists():
            make(plain, form.family, intermediate_size=64)
        return quantise(plain, directory, form)

    return give


def refused(scene: Scene, source: Path, damage: Damage, sentence: str, *options: str) -> None:
    copy = Path(shutil.copytree(source, scene.root / "source"))
    damage(copy)
    scene.refused("convert", copy, *GQA, *options, "--out", scene.root / "out", says=sentence)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_damaged_source_of_a_family(scene: Scene, sound: Callable[[str], Path], case: str) -> None:
    family, damage, sentence = FAMILIES[case]
    refused(scene, sound(family), damage, sentence)


@pytest.mark.parametrize("case", QUANTISED)
def test_a_damaged_quantised_source(scene: Scene, sound: Callable[[str], Path], case: str) -> None:
    form, damage, sentence = QUANTISED[case]
    refused(scene, sound(form), damage, sentence)


@pytest.mark.parametrize("value", CONFIGS)
@pytest.mark.parametrize("form", ["llama", "gptq", "fp8 blocks"])
def test_a_quantization_config_of_no_known_form(
    scene: Scene, sound: Callable[[str], Path], form: str, value: str
) -> None:
    refused(scene, sound(form), config(quantization_config=CONFIGS[value]), "quant")


@pytest.mark.parametrize("value", EMPTY)
def test_an_empty_quantization_config(scene: Scene, sound: Callable[[str], Path], value: str) -> None:
    refused(scene, sound("gptq"), config(quantization_config=EMPTY[value]), "")


@pytest.mark.parametrize("case", TOWERS)
@pytest.mark.parametrize("options", [(), ("--text-only",)], ids=["whole", "text"])
def test_a_damaged_multimodal_source(
    scene: Scene, sound: Callable[[str], Path], case: str, options: tuple[str, ...]
) -> None:
    damage, sentence = TOWERS[case]
    if options and ("image" in case or case == "projector"):
        pytest.skip("the text tower alone does not read it")
    refused(scene, sound("llava"), damage, sentence, *options)


@pytest.mark.parametrize("case", QUANTISED_TOWERS)
@pytest.mark.parametrize("options", [(), ("--text-only",)], ids=["whole", "text"])
def test_a_damaged_quantised_multimodal_source(
    scene: Scene, sound: Callable[[str], Path], case: str, options: tuple[str, ...]
) -> None:
    form, damage, sentence = QUANTISED_TOWERS[case]
    refused(scene, sound(f"llava {form}"), damage, sentence, *options)


LAYERS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "window": (
        "gemma3_text",
        lambda content: content.update(sliding_window=None),
        "has layers of the kind sliding_attention and no sliding_window",
    ),
    "experts": (
        "qwen3_moe",
        lambda content: content.update(num_experts_per_tok=10),
        "has num_experts_per_tok 10 and 4 experts",
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_no_forward_pass_survives_are_refused(scene: Scene, case: str) -> None:
    """Their classes load such a configuration, and end with an error in every forward pass."""
    family, damage, words = LAYERS[case]
    source = make(scene.root / "source", family)
    edit_json(source / "config.json", damage)
    scene.refused("convert", source, *GQA, "--out", scene.root / "out", says=words)
    save_tokenizer(source)
    (scene.root / "text.txt").write_text("a text " * 50)
    scene.refused("eval", source, "--text", scene.root / "text.txt", "--suite", "ppl", says=words)


@pytest.mark.parametrize("kind", [[], {"a": 1}])
def test_a_multimodal_model_of_no_kind_is_refused(scene: Scene, kind: Any) -> None:
    source = make_multimodal(scene.root / "source", "llava")
    edit_json(source / "config.json", lambda content: content.update(model_type=kind))
    scene.refused("convert", source, *GQA, "--out", scene.root / "out")


def test_a_limit_beyond_the_numbers_of_weights_is_refused(scene: Scene) -> None:
    source = make(scene.root / "source", "gpt_oss")
    edit_json(source / "config.json", lambda content: content.update(swiglu_limit=1e308))
    scene.refused("convert", source, *GQA, "--out", scene.root / "out", says="swiglu_limit 1e+308, where a")


def test_a_seed_that_torch_does_not_take_is_refused(scene: Scene) -> None:
    source = make(scene.root / "source")
    (scene.root / "text.txt").write_text("a text " * 50)
    words = ("--calibration", scene.root / "text.txt", "--seed", str(10**40))
    for command in (("convert", source, *GQA[:4], "--out", scene.root / "out"), ("plan", source)):
        scene.refused(*command, *words, says="it should be less than or equal to 9223372036854775807")
