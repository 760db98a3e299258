"""Checkpoints as their authors publish them: old fields, code of their own, tensors that no class reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.checkpoints.shards import INDEX
from kvfold.convert.families.recognition import family_of
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.source import open_source
from kvfold.convert.families.unfolded import CODE_ONLY
from kvfold.core.errors import InvalidInput

from ...support.folds import attempt
from ...support.tiny import make

FULL = ("--to", "mla", "--rank", "full", "--calibration", "none", "--container", "stock")
HALF = ("--to", "gqa", "--kv-heads", "4", "--calibration", "none")
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32}
# Fields of the config.json of a published member of a family, apart from sizes; of lengths, the tiny checkpoint's.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-2b": ("gemma", {"hidden_act": "gelu", "hidden_activation": None, "rope_scaling": None,
                           "rope_theta": 10000.0, "rms_norm_eps": 1e-06, "attention_bias": False}),
    "gemma-1.1-2b-it": ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                                  "rope_scaling": None, "rope_theta": 10000.0}),
    "Llama-2-7b-hf": ("llama", {"hidden_act": "silu", "pretraining_tp": 1, "rms_norm_eps": 1e-05,
                                "rope_scaling": None, "torch_dtype": "float32"}),
    "Llama-3.1-8B": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "rms_norm_eps": 1e-05,
                               "mlp_bias": False, "pretraining_tp": 1}),
    "Mistral-7B-v0.3": ("mistral", {"rope_theta": 1000000.0, "sliding_window": None, "rms_norm_eps": 1e-05}),
    "Qwen2.5-7B": ("qwen2", {"rope_theta": 1000000.0, "sliding_window": 512, "max_window_layers": 28,
                             "use_mrope": False, "use_sliding_window": False, "rms_norm_eps": 1e-06}),
    "Phi-3-mini-4k-instruct": ("phi3", {"rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 2047,
                                        "original_max_position_embeddings": 512, "embd_pdrop": 0.0,
                                        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05}),
    "OLMo-7B-hf": ("olmo", {"clip_qkv": None, "rope_theta": 10000.0, "rope_scaling": None,
                            "pretraining_tp": 1}),
    "SmolLM3-3B": ("smollm3", {"rope_theta": 5000000.0, "rope_scaling": None, "no_rope_layers": [1, 0],
                               "no_rope_layer_interval": 4, "use_sliding_window": False,
                               "sliding_window": None, "max_window_layers": 28, "mlp_bias": False}),
    "DeepSeek-V2-Lite": ("deepseek_v2", {"rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 0.707,
                                         "mscale_all_dim": 0.707}, "topk_method": "greedy", "ep_size": 1,
                                         "scoring_func": "softmax", "norm_topk_prob": False, "seq_aux": True,
                                         "attention_bias": False, "pretraining_tp": 1,
                                         "auto_map": {"AutoModelForCausalLM": "m.DeepseekV2ForCausalLM"}}),
    "DeepSeek-V3": ("deepseek_v3", {"rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 1.0,
                                    "mscale_all_dim": 1.0}, "topk_method": "noaux_tc", "ep_size": 1,
                                    "scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 1,
                                    "num_nextn_predict_layers": 1,
                                    "auto_map": {"AutoModelForCausalLM": "m.DeepseekV3ForCausalLM"}}),
    "Moonlight-16B-A3B": ("deepseek_v3", {"rope_theta": 50000.0, "topk_method": "noaux_tc", "ep_size": 1,
                                          "seq_aux": True, "scoring_func": "sigmoid"}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {"rope_theta": 1000000, "rope_scaling": None, "topk_method": "noaux_tc",
                                        "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1}),
    "MiniCPM3-4B": ("minicpm3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0, 1.1, 2.4, 30.0],
                                 "short_factor": [1.0, 1.1, 2.4, 30.0],
                                 "original_max_position_embeddings": 512}, "scale_emb": 12, "scale_depth": 1.4,
                                 "dim_model_base": 256, "rope_theta": 10000.0,
                                 "auto_map": {"AutoModelForCausalLM": "m.MiniCPM3ForCausalLM"}}),
}  # fmt: skip


def say(source: Path, **fields: Any) -> Path:
    """Give config.json other fields, as transformers 4 wrote them where they are about rotation."""
    config = json.loads((source / "config.json").read_text())
    if "rope_theta" in fields or "rope_scaling" in fields:
        del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config | fields))
    return source


def convert(source: Path, out: Path, *options: str) -> str:
    code, text = attempt(source, out, *options)
    assert code == 0, text
    return text


def logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.as_tensor(model(torch.arange(40)[None] ** 2 * 7 % 97).logits)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_moves_to_another_class_is_what_the_source_s_class_loads(name: str, tmp_path: Path) -> None:
    """Gemma's class, for one, takes the published `gelu` for its tanh form."""
    kind, fields = PUBLISHED[name]
    source = say(make(tmp_path / "source", kind, hidden_size=64), **fields)
    convert(source, tmp_path / "out", *(FULL[:-2] if FAMILIES[kind].latent else FULL))
    wanted = logits(source)
    assert float(wanted.std()) > 0.05
    torch.testing.assert_close(logits(tmp_path / "out"), wanted, rtol=0, atol=5e-5)


def test_code_of_a_checkpoint_is_named_and_not_read(tmp_path: Path) -> None:
    source = say(make(tmp_path / "source"), auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    code, text = attempt(source, tmp_path / "out", *HALF)
    assert code == 2
    assert "'modeling_x.XForCausalLM', which kvfold does not read; to fold the weights as" in text
    assert not (tmp_path / "out").exists()
    told = convert(source, tmp_path / "out", *HALF, "--ignore-code")
    assert "the output computes what LlamaForCausalLM of transformers computes" in told
    assert "next to its weights was not read" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["request"]["ignore_code"] is True
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_code_of_the_class_s_own_name_is_only_told(tmp_path: Path) -> None:
    source = say(make(tmp_path / "source"), auto_map={"AutoModelForCausalLM": "m--x.LlamaForCausalLM"})
    assert "'m--x.LlamaForCausalLM', which kvfold does not read" in convert(source, tmp_path / "out", *HALF)


@pytest.mark.parametrize("kind", CODE_ONLY)
def test_families_that_only_code_computes_are_told_where_they_can_go(kind: str) -> None:
    with pytest.raises(InvalidInput, match=r"exists only as code of its checkpoints.*(ForCausalLM|no class)"):
        family_of({"model_type": kind})


def test_a_layer_behind_the_last_is_told(tmp_path: Path) -> None:
    """GLM-4.5 predicts further tokens by it, and its class ignores its weights."""
    settings = {
        "num_hidden_layers": 46, "first_k_dense_replace": 45, "n_shared_experts": 1, "hidden_size": 64,
    }  # fmt: skip
    source = make(tmp_path / "source", "glm4_moe", **settings)
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if "layers.45." in name]:
        weights[name.replace("layers.45.", "layers.46.")] = weights[name].clone()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    told = convert(source, tmp_path / "out", *HALF)
    assert "layer 46 comes after the 46 layers of config.json" in told
    assert "layer 46 comes after" in (tmp_path / "out" / "kvfold.json").read_text()


def test_tensors_that_no_index_lists_are_left_out(tmp_path: Path) -> None:
    source = make(tmp_path / "source", shard_size="20KB")
    files = set(json.loads((source / INDEX).read_text())["weight_map"].values())
    shard = source / min(files)
    save_file(load_file(shard) | {"model.mtp.eh_proj.weight": torch.ones(4, 4)}, shard, {"format": "pt"})
    told = convert(source, tmp_path / "out", *HALF)
    assert f"does not list 1 tensors of {shard.name}, e.g. model.mtp.eh_proj.weight; they are left" in told
    assert "model.mtp.eh_proj.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_fewer_heads_say_their_rotation_in_both_forms(rope: str, tmp_path: Path) -> None:
    """Engines and transformers 4 read rope_theta and rope_scaling, transformers 5 rope_parameters."""
    source = make(tmp_path / "source", rope=rope)
    convert(source, tmp_path / "out", "--to", "gqa", "--kv-heads", "8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stated = config["rope_parameters"]
    assert config["rope_theta"] == stated["rope_theta"]
    scaling = {key: value for key, value in stated.items() if key != "rope_theta"}
    assert config["rope_scaling"] == (None if rope == "default" else scaling)
    assert torch.equal(logits(tmp_path / "out"), logits(source))


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "base_model.model."])
def test_names_of_a_wrapper_are_told(wrapper: str, tmp_path: Path) -> None:
    """Downloading such a checkpoint again gives the same names."""
    source = make(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file({wrapper + name: tensors[name] for name in tensors}, source / "model.safetensors")
    with pytest.raises(InvalidInput, match=f"save the model without the wrapper that added `{wrapper[:-1]}`"):
        open_source(source)
