"""Every row of the table of families says what transformers' own class does: its attention, its defaults."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.cli import main as kvfold
from kvfold.convert.algebra import forward
from kvfold.convert.families.family import Block
from kvfold.convert.families.latent_layout import written_latent
from kvfold.convert.families.packing import pack, unpack
from kvfold.convert.families.recognition import as_causal, attending, complete, rotated
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.source import open_source
from kvfold.convert.families.unfolded import UNFOLDED, verdict
from kvfold.convert.towers.text_class import holds_other_classes
from kvfold.convert.towers.tower import find_tower
from kvfold.core.errors import InvalidInput

from ...support.folds import convert
from ...support.tiny import make
from ...support.towers import TOWERS, make_multimodal

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TOKENS = 24
SHORT = ("--sequences", "8", "--length", "48", "--refine", "0")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / request.param, request.param, **SHAPE)


def test_attention_is_the_module_s(made: Path) -> None:
    """A row's tensors and properties give the class's output, by the pass that folds are measured with."""
    # Behind so many tokens Llama 4 attends in chunks, and scales queries of layers without rotation.
    tokens = 7 if made.name == "llama4_text" else TOKENS
    source = open_source(made)
    model = AutoModelForCausalLM.from_pretrained(
        made, attn_implementation="eager", dtype=torch.float32
    ).eval()
    seen: dict[str, Tensor] = {}
    for layer in source.attending:
        names = source.family.projections(layer)
        reads = names[source.family.roles[0]]
        if source.family.latent:
            reads = f"{source.latent_place(layer)}kv_a_proj_with_mqa"
        model.get_submodule(reads).register_forward_pre_hook(
            lambda _, inputs, layer=layer: seen.__setitem__(f"x{layer}", inputs[0])
        )
        model.get_submodule(names["o"]).register_forward_hook(
            lambda _, inputs, output, layer=layer: seen.__setitem__(f"y{layer}", output)
        )
    with torch.no_grad():
        model(torch.arange(tokens)[None] ** 2 * 7 % 97)
    for layer in source.attending:
        attention: forward.AnyAttention
        if source.family.latent:
            attention, table_F = source.latent_attention(layer), source.latent_frequencies(layer)
        else:
            table_F, factor = source.frequencies(layer)
            attention = source.attention(layer, factor)
        input_BTD = seen[f"x{layer}"].view(1, tokens, -1).double()
        ours = forward.attend(attention, input_BTD, table_F, source.scoring(layer))
        theirs = seen[f"y{layer}"].view(1, tokens, -1).double()
        size = float(theirs.std())
        assert size > 0.01, "too small to tell anything"
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * max(size, 1))


def test_packing_is_undone(made: Path) -> None:
    """Tensors become attention and the same tensors again, bit for bit."""
    source = open_source(made)
    if source.family.latent:
        latent, interleaved = source.latent_attention(1), source.family.rotary != "half"
        written = written_latent(latent, interleaved=interleaved, factor=source.nominal_frequencies(1)[1])
        place = source.latent_place(1)
        assert {place + name for name in written} == {*source.reads(1)}
        for name, tensor in written.items():
            torch.testing.assert_close(tensor, source.checkpoint[place + name].double(), rtol=1e-15, atol=0)
        return
    attention, own = source.attention(1), source.shape(1)
    packed = pack(attention, own.family, own.rotary_width)
    norms = {} if "k_norm" in packed or source.family.k_norm is None else {
        f"{which}_norm": source.checkpoint[next(iter(source.family.norms(which, 1, own.geometry)))].double()
        for which in ("q", "k")
    }  # fmt: skip
    # Its own tensor, which no fold writes.
    gate = {"gate.weight": attention.gate_NHD.flatten(0, 1)} if own.family.gate not in {None, "q"} else {}
    again = unpack(packed | norms | gate, own.family, own.geometry, own.rotary_width, attention.scale)
    assert torch.equal(again.q_NHD, attention.q_NHD)
    assert torch.equal(again.k_KHD, attention.k_KHD)
    assert (again.gate_NHD is None) == (attention.gate_NHD is None)
    assert again.gate_NHD is None or torch.equal(again.gate_NHD, attention.gate_NHD)  # type: ignore[arg-type]
    names = dict(zip(source.reads(1), source.reads(1), strict=True))
    assert sum(tensor.numel() for tensor in packed.values()) == sum(
        source.checkpoint[name].numel() for name in names
    )


@pytest.mark.parametrize(("field", "value", "words"), [
    ("first_k_dense_replace", "1", "first_k_dense_replace '1', where a whole number"),
    ("mlp_layer_types", ["dense"], r"\(2\) must be equal to the number of `mlp_layer_types` \(1\)"),
    ("mlp_layer_types", 3, "'mlp_layer_types' with value 3"),
    ("sliding_window_pattern", "4", "'sliding_window_pattern' expected int, got str"),
])  # fmt: skip
def test_fields_of_rotating_layers_are_checked(tmp_path: Path, field: str, value: Any, words: str) -> None:
    source = make(tmp_path / "source", "cohere2_moe")
    config = json.loads((source / "config.json").read_text())
    kept = {key: config[key] for key in config.keys() - {"layer_types"}}
    (source / "config.json").write_text(json.dumps({**kept, field: value}))
    with pytest.raises(InvalidInput, match=words):
        open_source(source)


def test_what_rows_say_of_defaults_is_what_the_class_has() -> None:
    """The listing reads rows alone, so that it loads no configuration class of transformers."""
    for kind, family in FAMILIES.items():
        config = complete(family, {"model_type": kind})
        rotate = {rotated(family, config, layer) for layer in attending(family, config)}
        assert (len(rotate) > 1) == (family.unrotated is not None), kind
        if isinstance(family.block, Block):
            assert config["hidden_act"] == family.block.activation, kind
            limited = bool(config.get("sliding_window") and config.get("use_sliding_window", True))
            assert limited == family.windowed, kind
    code = "import sys; from kvfold.cli import main; main(['families', '--json'], standalone_mode=False); "
    code += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_causal_language_model_of_transformers_is_examined() -> None:
    """Each has a row or a reason, not both; `--all` prints them, and a class of tomorrow is not examined."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert kinds <= FAMILIES.keys() | UNFOLDED.keys()
    assert not FAMILIES.keys() & UNFOLDED.keys()
    printed = json.loads(CliRunner().invoke(kvfold, ["families", "--all", "--json"]).stdout)["causal"]
    assert printed.keys() == kinds
    assert printed["llama"] == "supported"
    assert printed["mamba"] == "it has no attention"
    assert verdict("of-tomorrow", FAMILIES) == "not examined"


def test_every_multimodal_model_of_transformers_is_listed_with_what_a_fold_says(tmp_path: Path) -> None:
    """A row names the targets that a source of the class takes in its place, by the code that folds it."""
    every = CliRunner().invoke(kvfold, ["families", "--all", "--json"])
    printed = json.loads(every.stdout)["multimodal"]
    for kind in TOWERS:
        tower = find_tower(make_multimodal(tmp_path / kind, kind))
        row = printed[kind]
        assert as_causal(row["text"]) in {tower.model_type, "any"}
        assert row["in_place"][:2] == ["gqa", "mqa"]
        assert ("mla" in row["in_place"]) == holds_other_classes(tower.directory, "deepseek_v3"), kind
    assert {kind for kind in printed if printed[kind]["tested"]} == TOWERS.keys()
    none = {"text": None, "in_place": [], "tested": False}
    assert printed["florence2"] == {**none, "why": "it is an encoder-decoder model"}
    assert printed["mllama"]["why"] == "not examined"
    assert printed["gemma3n"]["why"] == UNFOLDED["gemma3n_text"]
    table = CliRunner().invoke(kvfold, ["families", "--all"]).stdout
    assert "multimodal models of transformers" in table
    assert "gemma3_text" in table


# name -> (family, what config.json says, a part of the sentence)
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "key norm with bias": ("phi", {"qk_layernorm": True},
                           "folds Phi-1, Phi-2 where it is False, because kvfold has no key norms with a bias"),
    "old decoder": ("falcon", {"new_decoder_architecture": False},
                    "kvfold folds Falcon, new decoder where it is True"),
    "alibi": ("falcon", {"alibi": True, "new_decoder_architecture": True}, "alibi True; kvfold"),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_variants_that_are_refused(case: str) -> None:
    from kvfold.convert.families.recognition import family_of

    kind, config, sentence = VARIANTS[case]
    with pytest.raises(InvalidInput, match=sentence):
        family_of({"model_type": kind, **config})


@pytest.mark.parametrize("kind", ["olmo", "olmoe"])
def test_bounded_attention_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    directory = make(tmp_path / kind, kind, **SHAPE, clip_qkv=0.5)
    source = open_source(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).model
    input_BTD = torch.randn(1, 9, 64, dtype=torch.float64)
    angles = model.rotary_emb(input_BTD, torch.arange(9)[None])
    with torch.no_grad():
        wanted_BTD, _ = model.layers[0].self_attn(input_BTD, position_embeddings=angles, attention_mask=None)
    found_BTD = forward.attend(source.attention(0), input_BTD, source.frequencies()[0], source.scoring(0))
    torch.testing.assert_close(found_BTD, wanted_BTD, atol=1e-5, rtol=1e-5)


def test_statistics_of_a_bounded_source_predict_its_loss(tmp_path: Path) -> None:
    """transformers bounds projections in place, and statistics are of what they were before."""
    shape = {**SHAPE, "num_key_value_heads": 4}
    source = make(tmp_path / "source", "olmo", equal_heads=True, **shape, clip_qkv=0.3)
    convert(source, "--to", "mqa", "--verify", "none", *SHORT, out=tmp_path / "out", code=0)
    assert json.loads((tmp_path / "out/kvfold.json").read_text())["predicted_loss"] < 1e-6


@pytest.mark.parametrize("container", ["stock", "remote"])
def test_bounded_queries_have_no_latent_form(container: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "olmo", **SHAPE, clip_qkv=8.0)
    text = convert(
        source, "--to", "mla", "--rank", "full", "--container", container, out=tmp_path / "out", code=2
    ).output
    assert "clip_qkv 8.0 bounds its queries, keys and values" in text
    assert "--to gqa" in text


def test_exaone_without_a_window_rotates_everywhere(tmp_path: Path) -> None:
    """Then its configuration writes the pattern 0."""
    full = ["full_attention"] * 2
    directory = make(
        tmp_path / "exaone4", "exaone4", **{**SHAPE, "sliding_window": None, "layer_types": full}
    )
    file = directory / "config.json"
    config = json.loads(file.read_text())
    assert config["sliding_window_pattern"] == 0
    source = open_source(directory)
    assert all(rotated(source.family, source.config, layer) for layer in range(2))
    file.write_text(json.dumps({**config, "sliding_window_pattern": ["L"]}))
    with pytest.raises(InvalidInput, match=r"cannot read config.json: .*'sliding_window_pattern'"):
        open_source(directory)
