"""Every cell of the table of families: the output is the source, or a sentence says why not."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvfold.cli import main as kvfold
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.support import Support, support

from ...support.folds import attempt, convert
from ...support.tiny import ROPE, make, same_bytes
from ...support.warm_python import warm_python

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
MLA_FULL = ("--to", "mla", "--rank", "full", "--calibration", "none", "--container", "stock")
MLA_REMOTE = (*MLA_FULL[:-1], "remote")
# target -> (whether the source's heads are equal, options); each is lossless
LOSSLESS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "gqa": (False, ("--to", "gqa", "--kv-heads", "4")),
    "mqa": (True, ("--to", "mqa", "--calibration", "none")),
    "mla": (False, MLA_FULL),
    "mla remote": (False, MLA_REMOTE),
    "mla narrowed": (False, MLA_FULL[:-2]),
}
REMOTE = "mla remote"
REFUSED = {name: options for name, (_, options) in LOSSLESS.items()}
REFUSED["gqa"] = ("--to", "gqa", "--kv-heads", "2", "--calibration", "none")


def name_of(cell: Support) -> str:
    """A target; MLA has three containers."""
    return f"mla {cell.container}" if cell.container in {"remote", "narrowed"} else cell.target


def cells_of(kind: str) -> dict[str, Support]:
    """A family's cells; those for serving are test_serving.py's."""
    return {name_of(cell): cell for cell in support(kind) if cell.container != "serving"}


def edit_config(source: Path, drop: tuple[str, ...], **changes: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in drop}
    (source / "config.json").write_text(json.dumps(kept | changes))


def neox_of_4x(source: Path) -> None:
    edit_config(source, ("rope_parameters",), rotary_pct=0.25, rotary_emb_base=500, rope_scaling=None)


def bare_gpt2(source: Path) -> None:
    """As the first GPT-2 checkpoints are: names without a prefix, and masks among the weights."""
    tensors = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    save_file(bare | masks, source / "model.safetensors", {"format": "pt"})


def gemma3_of_4x(source: Path) -> None:
    dropped = ("rope_parameters", "layer_types", "_sliding_window_pattern")
    edit_config(source, dropped, rope_theta=1e4, rope_local_base_freq=1e3, sliding_window_pattern=2)


def flat_rope(source: Path, **changes: Any) -> None:
    """As transformers 4 wrote configurations: one set of rope parameters, whatever the kinds of layers are."""
    edit_config(source, ("rope_parameters",), **changes)


def yarn_of_4x(source: Path) -> None:
    scaling = {key: value for key, value in ROPE["yarn"].items() if key != "rope_theta"}
    flat_rope(source, rope_theta=1e4, rope_scaling={**scaling, "attention_factor": 1.2})


def llama3_of_4x(source: Path) -> None:
    """Theta and factors are not those that the class has where nothing is said."""
    scaling = {key: value for key, value in ROPE["llama3"].items() if key != "rope_theta"}
    flat_rope(source, rope_theta=1e5, rope_scaling=scaling)


def hunyuan_of_4x(source: Path) -> None:
    flat_rope(source, rope_theta=100.0, rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0})


def no_rope(source: Path) -> None:
    flat_rope(source, rope_theta=1e4)


def nothing(source: Path) -> None:
    pass


# name -> (family, equal heads, how the source is made, what is done to it, options)
VARIANTS: dict[str, tuple[str, bool, dict[str, Any], Callable[[Path], None], tuple[str, ...]]] = {
    "neox, 4.x config": ("gpt_neox", True, {}, neox_of_4x, ("--to", "gqa", "--kv-heads", "2", "--calibration",
                                                            "none")),
    "neox, all rotary": ("gpt_neox", False, {"rope_parameters": {**ROPE["yarn"],
                                                                 "partial_rotary_factor": 1.0}}, nothing,
                         ("--to", "gqa", "--kv-heads", "4")),
    "gpt2, bare": ("gpt2", True, {}, bare_gpt2, ("--to", "mqa", "--calibration", "none")),
    "gpt2, all heads": ("gpt2", False, {}, nothing, ("--to", "gqa", "--kv-heads", "4")),
    "gpt2, scaled by layer": ("gpt2", True, {"scale_attn_by_inverse_layer_idx": True}, nothing,
                              ("--to", "mqa", "--calibration", "none")),
    "gemma3, 4.x config": ("gemma3_text", True, {}, gemma3_of_4x, ("--to", "mqa", "--calibration", "none")),
    "gemma3, 4.x config, yarn": ("gemma3_text", False, {}, yarn_of_4x, MLA_REMOTE),
    "olmo3, 4.x config, yarn": ("olmo3", False, {}, yarn_of_4x, MLA_REMOTE),
    "olmo3, 4.x config, yarn, heads": ("olmo3", False, {}, yarn_of_4x, ("--to", "gqa", "--kv-heads", "4")),
    "olmo3, 4.x config": ("olmo3", False, {}, no_rope, MLA_REMOTE),
    "cwm, 4.x config": ("cwm", False, {}, llama3_of_4x, MLA_REMOTE),
    "cwm, 4.x config, heads": ("cwm", True, {}, llama3_of_4x, ("--to", "mqa", "--calibration", "none")),
    "apertus, 4.x config": ("apertus", False, {}, llama3_of_4x, MLA_REMOTE),
    "hunyuan, 4.x config": ("hunyuan_v1_dense", True, {}, hunyuan_of_4x,
                            ("--to", "mqa", "--calibration", "none")),
    "ministral 3, no rope parameters": ("ministral3", True, {}, no_rope,
                                        ("--to", "mqa", "--calibration", "none")),
    "gpt-oss, no rope parameters": ("gpt_oss", False, {}, no_rope, MLA_REMOTE),
    "phi3, partly rotary": ("phi3", True, {"rope_parameters": {**ROPE["default"],
                                                               "partial_rotary_factor": 0.75}}, nothing,
                            ("--to", "mqa", "--method", "aligned")),
    "qwen3, aligned": ("qwen3", True, {"attention_bias": True}, nothing,
                       ("--to", "mqa", "--method", "aligned")),
    "granite, tied": ("granite", False, {"tie_word_embeddings": True, "attention_bias": True}, nothing,
                      MLA_FULL),
    "granite, tied, shards": ("granite", False, {"tie_word_embeddings": True, "shard_size": "20KB"}, nothing,
                              MLA_FULL),
    "gemma, grouped": ("gemma", False, {"num_key_value_heads": 2}, nothing, MLA_FULL),
    "gemma, untied": ("gemma", False, {"tie_word_embeddings": False}, nothing, MLA_FULL),
    "olmo, biases": ("olmo", False, {"attention_bias": True, "num_key_value_heads": 2}, nothing, MLA_FULL),
    "olmo, tied": ("olmo", False, {"tie_word_embeddings": True}, nothing, MLA_FULL),
    "phi3, partly rotary, latent": (
        "phi3", False, {"num_key_value_heads": 2, "rope_parameters": {**ROPE["default"],
                                                                      "partial_rotary_factor": 0.75}},
        nothing, MLA_FULL,
    ),
    "olmo, bounded": ("olmo", True, {"clip_qkv": 0.5}, nothing, ("--to", "mqa", "--calibration", "none")),
    "olmo, bounded, heads": ("olmo", False, {"clip_qkv": 0.5}, nothing, ("--to", "gqa", "--kv-heads", "4")),
    "olmoe, bounded": ("olmoe", False, {"clip_qkv": 0.5}, nothing, ("--to", "gqa", "--kv-heads", "4")),
    "smollm3, grouped": ("smollm3", False, {"num_key_value_heads": 1, "hidden_size": 128,
                                            "attention_bias": True}, nothing,
                         MLA_FULL),
    "smollm3, unrotated": ("smollm3", False, {"no_rope_layers": [0, 0]}, nothing, MLA_REMOTE),
    "cohere, no norms": ("cohere", True, {"use_qk_norm": False}, nothing,
                         ("--to", "mqa", "--calibration", "none")),
    "cohere, no norms, latent": ("cohere", False, {"use_qk_norm": False}, nothing, MLA_REMOTE),
    "cohere, decoupled": ("cohere", False, {"num_key_value_heads": 2, "attention_bias": True}, nothing,
                          (*MLA_REMOTE, "--rope", "decoupled")),
    "stablelm, no norms": ("stablelm", True, {"qk_layernorm": False}, nothing,
                           ("--to", "mqa", "--calibration", "none")),
    "stablelm, no norms, latent": ("stablelm", False, {"qk_layernorm": False}, nothing, MLA_REMOTE),
    "stablelm, decoupled": ("stablelm", False, {"num_key_value_heads": 2}, nothing,
                            (*MLA_REMOTE, "--rope", "decoupled")),
    "cohere2, unrotated": ("cohere2", False, {"layer_types": ["full_attention"] * 2}, nothing, MLA_REMOTE),
    "cohere2, unrotated, heads": ("cohere2", True, {"layer_types": ["full_attention"] * 2}, nothing,
                                  ("--to", "mqa", "--method", "aligned", "--calibration", "none")),
    "cohere2 moe, dense layers rotate": (
        "cohere2_moe", False, {"prefix_dense_sliding_window_pattern": 1}, nothing, MLA_REMOTE
    ),
    "phi3, grouped": ("phi3", False, {"num_key_value_heads": 1}, nothing, MLA_FULL),
}  # fmt: skip
# Runs apart from the tests, where kvfold cannot be imported even by accident. Steps with the cache give what the
# source's give (transformers' MiniMax and Bamba give other logits there than without), and the cache is measured.
PROBE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.set_verbosity_error(); logging.disable_progress_bar()
torch.set_grad_enabled(False)
ids = torch.arange(2 * 44).reshape(2, 44) ** 2 * 7 % 97  # beyond the 32 positions that some tables are made for
def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True).eval()
mask = torch.ones_like(ids)
mask[0, :5] = 0  # padding on the left
def padded(model):
    return torch.where(mask[..., None] == 1, model(input_ids=ids, attention_mask=mask, use_cache=False).logits, 0)
def stepped(model):
    first = model(input_ids=ids[:, :40], use_cache=True)
    cached, logits, state = first.past_key_values, [first.logits], first.past_key_values
    # Layers that do not attend keep a state, and no keys.
    attending = [layer for layer in cached.layers if getattr(layer, "keys", None) is not None]
    sizes = [(layer.keys.numel(), layer.values.numel()) for layer in attending]
    for token in range(40, 42):
        step = model(input_ids=ids[:, token : token + 1], past_key_values=state, use_cache=True)
        state = step.past_key_values
        logits.append(step.logits)
    return torch.cat(logits, 1), sizes
wanted, report = {}, []
for source, folded in json.load(sys.stdin):
    if source not in wanted:
        model = load(source)
        wanted[source] = model(input_ids=ids, use_cache=False).logits, padded(model), stepped(model)[0]
    model = load(folded)
    whole = model(input_ids=ids, use_cache=False).logits
    steps, sizes = stepped(model)
    intact = getattr(model.config, "kvfold", {}).get("form") == "intact"  # whose values are digits of positions
    cached = [keys + (0 if intact else values) for keys, values in sizes]
    report.append({
        "diff": (whole - wanted[source][0]).abs().max().item(), "size": whole.std().item(),
        "padded": (padded(model) - wanted[source][1]).abs().max().item(),
        "steps": (steps - wanted[source][2]).abs().max().item(),
        "cache": cached, "class": type(model).__name__, "form": getattr(model.config, "kvfold", {}).get("form", ""),
    })
assert "kvfold" not in sys.modules
print(json.dumps(report))
"""


def options_of(kind: str, target: str) -> dict[str, Any]:
    """Return the settings that a tiny checkpoint needs for its class to hold the target."""
    # As long as its positions.
    windows = {"sliding_window": 512} if target == "mla" and kind in {"ministral", "cwm"} else {}
    return {**SHAPE, **windows}


def observe(root: Path, cases: dict[str, tuple[Path, Path]]) -> dict[str, dict[str, Any]]:
    """Return what one process without kvfold sees of each output next to its source."""
    done = subprocess.run(
        [warm_python(), "-P", "-c", PROBE],
        input=json.dumps([list(map(str, pair)) for pair in cases.values()]), capture_output=True, text=True,
        cwd=root, check=False, env={**os.environ, "HF_MODULES_CACHE": str(root / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_is_true(kind: str, tmp_path: Path) -> None:
    """Logits within 5e-5, which vary by `size`; also by steps and with padding; the cache is as promised."""
    cells, cases = cells_of(kind), {}
    for name, cell in cells.items():
        equal, settings = LOSSLESS[name][0], options_of(kind, name)
        source = tmp_path / f"{equal}-{'window' if settings == SHAPE else 'none'}"
        if not source.exists():
            make(source, kind, equal_heads=equal, **settings)
        code, text = attempt(
            source, tmp_path / name, *(REFUSED[name] if cell.status == "no" else LOSSLESS[name][1])
        )
        if cell.status == "no":
            assert (code, text[:7], (tmp_path / name).exists()) == (2, "Error: ", False), name
        else:
            assert code == 0, (name, text)
            cases[name] = source, tmp_path / name
    for name, seen in observe(tmp_path, cases).items():
        cell = cells[name]
        assert seen["size"] > 0.05, f"{name}: logits too small to tell anything"
        assert max(seen["diff"], seen["steps"], seen["padded"]) < 5e-5, (name, seen)
        assert len(seen["cache"]) == (1 if FAMILIES[kind].mixers else 2), f"{name}: layers that attend"
        assert seen["class"] == cell.architecture, name
        if "caches every query head" in cell.why:
            promised = 2 * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
        else:
            record = json.loads((tmp_path / name / "kvfold.json").read_text())
            promised = record["cache"]["after"]["elements_per_token_per_layer"]
        window = 9 - 1  # what a sliding layer of a tiny checkpoint keeps
        assert set(seen["cache"]) <= {2 * 40 * promised, 2 * window * promised}, name
        assert name != REMOTE or cell.why.partition(":")[0] == seen["form"]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, tmp_path: Path) -> None:
    """Old configurations, other layouts of one family, ties and biases: as exact."""
    kind, equal, settings, change, options = VARIANTS[name]
    source, out = (
        make(tmp_path / "source", kind, equal_heads=equal, **{**SHAPE, **settings}),
        tmp_path / "out",
    )
    change(source)
    convert(source, *options, out=out, code=0)
    seen = observe(tmp_path, {name: (source, out)})[name]
    assert seen["size"] > 0.05, "logits too small to tell anything"
    assert max(seen["diff"], seen["steps"]) < 5e-5, seen


def test_the_command_prints_the_same_table() -> None:
    printed = CliRunner().invoke(kvfold, ["families", "--json"])
    table = json.loads(printed.stdout)
    assert table.keys() == FAMILIES.keys()
    for kind in FAMILIES:
        printed_cells = {
            (c["container"], t, c["status"]) for t in ("gqa", "mqa", "mla") for c in table[kind][t]
        }
        assert printed_cells == {(cell.container, cell.target, cell.status) for cell in support(kind)}
    text = CliRunner().invoke(kvfold, ["families"]).output
    assert all(family.label in text for family in FAMILIES.values())


@pytest.mark.parametrize("kind", ["gemma", "granite", "olmo", "phi3", "gpt2"])
def test_tensors_change_piece_by_piece(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large embedding passes through memory in rows: the same bytes, however few at once."""
    source = make(tmp_path / "source", kind, **SHAPE)
    options = ("--to", "mqa", "--calibration", "none") if kind == "gpt2" else MLA_FULL
    assert attempt(source, tmp_path / "whole", *options)[0] == 0
    monkeypatch.setattr("kvfold.checkpoints.directory.PIECE", 300)
    assert attempt(source, tmp_path / "pieces", *options)[0] == 0
    assert same_bytes(tmp_path / "whole", tmp_path / "pieces") == []
