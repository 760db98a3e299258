#!/bin/sh
# bitsandbytes 0.50.2, transformers 5.24.0, torch 2.13.0, on a CPU, 2026-11-28.
#
# nn.Linear takes inputs of any number of dimensions, and so do bitsandbytes' 4-bit layers. Linear8bitLt takes two and
# three. An input of four raises an error if it has several tokens; of one token it runs and returns wrong numbers.
# transformers calls `kv_b_proj` of DeepSeek-V2 and -V3 with (batch, 1, tokens, rank), so `load_in_8bit` loads every
# such model and the first prompt fails. llm_int8_skip_modules=["kv_b_proj", "lm_head"] helps.
#
# Seen: an input (1, 1, 1, 64) gives results off by 2.2, and by 0.008 if it is reshaped to (1, 64), where results have a
# standard deviation of 0.6. The model raises RuntimeError, "The size of tensor a (40) must match the size of tensor b
# (64) at non-singleton dimension 2"; with `kv_b_proj` left out it runs.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet numpy transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2
"$work/venv/bin/python" - "$work/model" <<'EOF'
import sys

import torch
from bitsandbytes.nn import Linear8bitLt
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DeepseekV3Config, DeepseekV3ForCausalLM

torch.manual_seed(0)
plain, rounded = torch.nn.Linear(64, 32, bias=False), Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
rounded.load_state_dict(plain.state_dict())
rounded = rounded.to("cpu").eval()
x = torch.randn(1, 1, 1, 64)
with torch.no_grad():
    four, two = (float((rounded(y) - plain(y)).abs().max()) for y in (x, x.view(1, 64)))
print(f"off by {four:.3g} with four dimensions, {two:.3g} with two")
assert two < 0.05 < 0.5 < four, "the behaviour changed"

heads = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
experts = {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
config = DeepseekV3Config(num_attention_heads=2, num_key_value_heads=2, **heads, **experts, **sizes)
DeepseekV3ForCausalLM(config).save_pretrained(sys.argv[1])


def run(**options):
    settings = BitsAndBytesConfig(load_in_8bit=True, **options)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=settings)
    return model(input_ids=torch.arange(80).view(2, 40) % 64).logits


assert run(llm_int8_skip_modules=["kv_b_proj", "lm_head"]).isfinite().all()
try:
    run()
except RuntimeError as error:
    print(error)
    assert "must match the size of tensor" in str(error), "the behaviour changed"
else:
    sys.exit("the behaviour changed: kv_b_proj runs in 8 bits")
EOF
