"""A model directory from a GGUF file."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.gguf_source import main

WORDS = ["<pad>", "<s>", "</s>", "Ġ", "a", "b", "1", "2", "ab", "Ġab"]
LAYER = {  # names in Llama and in GGUF
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(WORDS), num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model as llama.cpp does: rows of a rotary pair next to each other."""
    config, state = model.config, model.state_dict()
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    named = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"} | {
        f"model.layers.{at}.{theirs}": f"blk.{at}.{ours}"
        for at in range(config.num_hidden_layers)
        for theirs, ours in LAYER.items()
    }
    for theirs, ours in named.items():
        weight = state[f"{theirs}.weight"].float()
        count = heads.get(ours.rpartition(".")[2])
        if count:
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{ours}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_in_parts_is_read_as_the_model_that_it_holds(
    model: LlamaForCausalLM, file: Path, tmp_path: Path
) -> None:
    content = file.read_bytes()
    parts = [tmp_path / "part00", tmp_path / "part01"]
    for part, half in zip(parts, (content[:1000], content[1000:]), strict=True):
        part.write_bytes(half)
    out = tmp_path / "out"
    result = CliRunner().invoke(main, [*map(str, parts), str(out)])
    assert result.exit_code == 0, result.output
    read = AutoModelForCausalLM.from_pretrained(out)
    assert read.dtype == torch.bfloat16
    assert not hasattr(read.config, "quantization_config")
    tokens = torch.randint(len(WORDS), (2, 12))
    assert torch.equal(read(tokens).logits, model(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("<s>ab ab12", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "ab", "Ġab", "1", "2"]


def test_another_file_and_an_existing_directory_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.bin"
    other.write_bytes(b"no model" * 100)
    result = CliRunner().invoke(main, [str(other), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "cannot be read as GGUF" in result.output
    result = CliRunner().invoke(main, [str(other), str(tmp_path)])
    assert result.exit_code == 1
    assert "exists" in result.output
