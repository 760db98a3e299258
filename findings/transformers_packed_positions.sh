#!/bin/sh
# transformers 5.24.0, torch 2.13.0, on a CPU, 2026-11-28.
#
# Several sequences can be packed into one row if position_ids begin at 0 again for each: transformers then lets tokens
# attend within their own sequence only. But it looks for such positions only if the call has no attention mask and
# makes no cache. use_cache is True by default, and a tokenizer returns a mask of ones. With either, tokens attend to
# the sequences before theirs, and no warning says so. Gradient checkpointing turns the cache off, so a model can be
# right while it trains and wrong when it is evaluated on the same batch. What helps: use_cache=False and no
# attention_mask.
#
# Seen, for a small random Llama and two sequences of 10 and 12 tokens, with sdpa and with eager attention: the logits
# of the second sequence are those that it has alone (to 5e-6) with use_cache=False, and in training with gradient
# checkpointing. In both other cases they are off by 9.7, where their standard deviation is 2.5.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet numpy transformers==5.24.0
"$work/venv/bin/python" - <<'EOF'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).eval()
first, second = torch.arange(10), torch.arange(12) * 5 % 64
batch = {"input_ids": torch.cat([first, second])[None]}
batch["position_ids"] = torch.cat([torch.arange(10), torch.arange(12)])[None]
ones = torch.ones_like(batch["input_ids"])
with torch.no_grad():
    alone = model(input_ids=second[None]).logits[0]
    print(f"standard deviation of the logits: {float(alone.std()):.3g}")
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        for options in ({"use_cache": False}, {}, {"use_cache": False, "attention_mask": ones}):
            off = float((model(**batch, **options).logits[0, 10:] - alone).abs().max())
            print(f"{attention}, {', '.join(options) or 'defaults'}: off by {off:.3g}")
            assert off < 1e-4 if list(options) == ["use_cache"] else off > 1, "the behaviour changed"
model.gradient_checkpointing_enable()
off = float((model.train()(**batch).logits[0, 10:] - alone).detach().abs().max())
print(f"in training with gradient checkpointing: off by {off:.3g}")
assert off < 1e-4, "the behaviour changed"
EOF
