"""A model directory from the tensors of a GGUF file."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.smollm2 import LAYER, llama, llama_config, tokenizer

FIELDS = {
    "llama.vocab_size": 23,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 24,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


def as_gguf(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return a model's tensors by GGUF's names, the rows of rotary pairs next to each other."""
    state, config = model.state_dict(), model.config
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in heads:  # llama.cpp: first dimensions of all pairs and second ones, interleaved
                halves = weight.view(heads[theirs], 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
    return tensors


def test_a_model_in_the_order_of_gguf_is_read_as_it_was() -> None:
    torch.manual_seed(0)
    config = llama_config(FIELDS)
    assert config.rms_norm_eps == 1e-5
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    read = llama(as_gguf(model), config)
    tokens = torch.randint(23, (2, 12))
    assert torch.equal(read(tokens).logits, model(tokens).logits)


def test_digits_are_tokens_and_special_tokens_are_whole() -> None:
    letters = ["Ġ", "a", "b", "1", "2", "ab", "Ġab"]
    made = tokenizer(
        FIELDS
        | {
            "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", *letters],
            "tokenizer.ggml.token_type": [3, 3, 3, *[1] * len(letters)],
            "tokenizer.ggml.merges": ["a b", "Ġ ab"],
            "tokenizer.chat_template": "{{ messages }}",
        }
    )
    tokens = made("<s>ab ab12")["input_ids"]
    assert [made.convert_ids_to_tokens(token) for token in tokens] == ["<s>", "ab", "Ġab", "1", "2"]
    assert made.decode(tokens, skip_special_tokens=True) == "ab ab12"
