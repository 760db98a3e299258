"""The stock class as other engines take it: exact where nothing is discarded, and its table is true."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.algebra.rotary import frequencies
from kvfold.convert.algebra.target import LatentTarget
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.source import STILL
from kvfold.convert.families.support import Support, support
from kvfold.convert.formats.serving import find_places, nearest_bands, table
from kvfold.convert.formats.serving_widths import SERVING
from kvfold.convert.methods.biases import nearest_to_one, without_key_bias, without_value_bias
from kvfold.convert.methods.latent import source_bands, to_mla, uniform_bands

from ...support.folds import FOR_ALL, LINEAR, QUICK, WEIGHTS, WIDE, convert, failing
from ...support.tiny import ROPE, make
from ...support.warm_python import warm_python

FULL = ("--to", "mla", "--rank", "full", *WEIGHTS)
ONE_HEAD = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
# name -> (family, how the source is made, engines): each has one key head whose pairs are all in the stock
# table
EXACT: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-5}, "vllm,sglang"),
    "llama, tied": ("llama", {"rms_norm_eps": 4e-6, "tie_word_embeddings": True}, FOR_ALL),
    "mistral, narrow heads": ("mistral", {"head_dim": 16, "rms_norm_eps": 1e-6}, "sglang"),
    "phi3": ("phi3", {"rms_norm_eps": 1e-5}, "vllm,sglang"),
    "granite, tied": ("granite", {"tie_word_embeddings": True}, "vllm"),
    "llama, tied for llama.cpp": ("llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}, "llama.cpp"),
    "granite, tied for llama.cpp": ("granite", {"tie_word_embeddings": True}, "llama.cpp"),
    "olmo": ("olmo", {}, "vllm,sglang"),
    "smollm3": ("smollm3", {}, "vllm,sglang"),
}
PROBE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
torch.set_grad_enabled(False)
ids = torch.arange(2 * 300).reshape(2, 300) ** 2 * 7 % 97  # far positions: where a rounded frequency shows
report = {}
for name, source, folded in json.load(sys.stdin):
    one, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (source, folded))
    a, b = one(ids).logits, other(ids).logits
    greedy = [m.generate(ids[:, :8], max_new_tokens=16, do_sample=False, pad_token_id=0) for m in (one, other)]
    cache = other(ids[:1, :10], use_cache=True).past_key_values.layers
    report[name] = {"diff": (a - b).abs().max().item(), "size": a.std().item(), "same": bool((greedy[0] == greedy[1]).all()),
                    "class": type(other).__name__, "cached": [(k.keys.numel() + k.values.numel()) / 10 for k in cache]}
assert "kvfold" not in sys.modules
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Outputs at full rank, and what one fresh process saw of them."""
    root = tmp_path_factory.mktemp("serving")
    for name, (family, settings, engines) in EXACT.items():
        make(root / f"{name}-source", family, **{**ONE_HEAD, **settings})
        convert(
            root / f"{name}-source", *FULL, "--container", "stock", "--engine", engines, out=root / name,
            code=0,
        )  # fmt: skip
    cases = json.dumps([(name, str(root / f"{name}-source"), str(root / name)) for name in EXACT])
    done = subprocess.run(
        [warm_python(), "-P", "-c", PROBE], input=cases, capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    return root, dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", EXACT)
def test_full_rank_is_the_source(name: str, exact: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """Zeros next to the weights, another epsilon, a written head and an identity change no logits."""
    root, report = exact
    seen, engines = report[name], EXACT[name][2]
    assert seen["size"] > 0.05, "logits too small to tell anything"
    assert seen["diff"] < 5e-5
    assert seen["same"]
    assert seen["class"] == "DeepseekV3ForCausalLM"
    assert failing(root / name, f"transformers,{engines}") == []
    record = json.loads((root / name / "kvfold.json").read_text())
    assert (
        set(seen["cached"]) == {SERVING.cached} == {record["cache"]["after"]["elements_per_token_per_layer"]}
    )
    assert record["engines"] == engines.split(",")
    assert f"--engine {engines}" in record["command"]
    # Quantisers of llama.cpp give a head that is the embeddings more bits than embeddings alone.
    is_tied = name.endswith("tied for llama.cpp")
    assert json.loads((root / name / "config.json").read_text())["tie_word_embeddings"] == is_tied
    assert ("lm_head.weight" not in load_file(root / name / "model.safetensors")) == is_tied


def test_a_power_of_two_scales_the_stream_without_rounding(tmp_path: Path) -> None:
    """Epsilon 4e-6 halves embeddings and down-projections to the bit, in bfloat16 too."""
    source = make(
        tmp_path / "source", rms_norm_eps=4e-6, tie_word_embeddings=True, dtype=torch.bfloat16, **ONE_HEAD
    )
    text = convert(
        source, *FULL, "--container", "stock", "--engine", "vllm", out=tmp_path / "out", code=0
    ).output
    assert "a power of two" in text
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        assert torch.equal(after[name] * 2, before[name])
    assert torch.equal(after["lm_head.weight"], before["model.embed_tokens.weight"])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_slots_of_the_stock_table() -> None:
    """Slots of the default table are the uniform rule's; of another table, no other slot is nearer."""
    slots_S = table(SERVING, 1e4)
    default_F, _ = frequencies(ROPE["default"], 128, 512)
    assert nearest_bands(default_F, slots_S, STILL) == uniform_bands(default_F, slots_S)
    llama3_F, _ = frequencies({**ROPE["llama3"], "rope_theta": 1e4}, 128, 512)
    still_F = torch.cat([llama3_F, torch.full((8,), STILL, dtype=torch.float64)])
    bands = nearest_bands(still_F, slots_S, STILL)
    assert sorted(pair for band in bands for pair in band.pairs) == list(range(len(llama3_F)))
    assert all(band.pairs for band in bands)
    for band in bands:
        for pair in band.pairs:
            distance_S = (slots_S.log() - llama3_F[pair].log()).abs()
            assert distance_S[(slots_S - band.frequency).abs().argmin()] < distance_S.min() + 1e-3
    assert find_places([band.frequency for band in bands], slots_S) is not None
    assert find_places([1e-3, 1e-3], slots_S) is None
    assert find_places([0.123], slots_S) is None


def test_biases_go_into_weights_where_the_input_has_a_constant() -> None:
    """Then attention without biases gives what attention with them does."""
    torch.manual_seed(0)
    x_BTD = torch.randn(3, 40, 12, dtype=torch.float64)
    x_BTD[..., 5] = 0.7
    shapes: dict[str, tuple[int, ...]] = {"q_NHD": (4, 8, 12), "k_KHD": (2, 8, 12), "v_KHD": (2, 8, 12)}
    shapes |= {"o_DNH": (12, 4, 8)}
    shapes |= {"q_NH": (4, 8), "k_KH": (2, 8), "v_KH": (2, 8)}
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    biased = Attention(**weights, scale=0.3)
    with_one_TE = torch.cat([x_BTD, torch.ones_like(x_BTD[..., :1])], -1).flatten(0, 1)
    one_D = nearest_to_one(with_one_TE.mT @ with_one_TE / len(with_one_TE))
    table_F, _ = frequencies(ROPE["default"], 8, 512)
    bands = source_bands(table_F, 2)
    slots_S = torch.tensor([band.frequency for band in bands for _ in range(band.slots)], dtype=torch.float64)
    target = LatentTarget(kv_lora_rank=16, qk_rope_head_dim=16, slots="source")
    latent = to_mla(without_value_bias(biased, one_D), target, table_F, bands, weights_only(biased, 512))
    unbiased = without_key_bias(latent, one_D)
    assert unbiased.q_rope_NR is unbiased.k_rope_R is unbiased.o_D is None
    torch.testing.assert_close(
        attend(unbiased, x_BTD, slots_S), attend(biased, x_BTD, table_F), rtol=1e-9, atol=1e-9
    )


def test_biases_are_folded_by_statistics(tmp_path: Path) -> None:
    """The output has none; what that loses is in the loss that is measured, and a sentence says so."""
    settings = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    source = make(tmp_path / "source", "qwen2", **settings)
    options = "--to mla --rank full --engine sglang --length 32 --sequences 6 --refine 0"
    text = convert(source, *options.split(), out=tmp_path / "out", code=0).output
    assert "biases of queries, keys and values go into their weights" in text
    assert "predicted loss" in text
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert not [name for name in names if name.endswith(".bias")]
    assert failing(tmp_path / "out", "vllm,sglang") == []


def cell_of(kind: str) -> Support:
    return next(cell for cell in support(kind) if cell.container == "serving")


def test_only_another_activation_keeps_the_stock_class_from_engines() -> None:
    """docs/serve.md says so: engines compute silu, and Gemma has another."""
    stock = {
        kind
        for kind in FAMILIES
        for cell in support(kind)
        if cell.container == "stock" and cell.status != "no"
    }
    assert {kind for kind in stock if cell_of(kind).status == "no"} == {"gemma"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_is_true(kind: str, tmp_path: Path) -> None:
    """A family is refused, or its output passes the engines' rules, in the class that the table names."""
    cell = cell_of(kind)
    settings = {**WIDE, "hidden_size": 512} if cell.status != "no" else {}
    settings |= {"sliding_window": 512} if kind in {"ministral", "cwm"} else {}  # as long as its positions
    source = make(tmp_path / "source", kind, **settings)
    biased = any(name.endswith("k_proj.bias") for name in load_file(source / "model.safetensors"))
    options = ("--to", "mla", "--engine", "vllm,sglang", "--container", "stock")
    options += (
        ("--length", "32", "--sequences", "4", "--refine", "0", "--slots", "uniform", *LINEAR)
        if biased and cell.status != "no"
        else QUICK
    )
    convert(source, *options, out=tmp_path / "out", code=2 if cell.status == "no" else 0)
    if cell.status != "no":
        assert failing(tmp_path / "out", "vllm,sglang") == []
        assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["container"] == cell.architecture
