#!/bin/sh
# mlx-lm 0.32.2, mlx 0.32.4, transformers 5.24.0, torch 2.13.0, on a CPU, 2026-11-28.
#
# transformers 5 saves the rotary base as rope_parameters.rope_theta and no longer as rope_theta. mlx-lm's Qwen3 reads
# both. Its Llama and Mistral (one class), Phi-3 and DeepSeek-V3 read only rope_theta, and take 10,000 without a warning
# if it is missing. So a Llama that was trained further and saved by transformers 5 rotates with another base than the
# one it was trained with. What helps: write rope_theta (and rope_scaling) into config.json next to rope_parameters.
#
# Seen, for a small random Llama of base 500,000: log-probabilities differ from those of transformers by up to 9.5, and
# by 2e-5 if config.json has rope_theta too.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet transformers==5.24.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
"$work/venv/bin/python" - "$work/model" <<'EOF'
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
rope = {"rope_type": "default", "rope_theta": 500_000.0}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, rope_parameters=rope, initializer_range=0.3))
model.save_pretrained(place)
ids = torch.arange(40)[None] * 7 % 64
with torch.no_grad():
    expected = model.eval()(input_ids=ids).logits[0].log_softmax(-1)


def difference():
    found = load_model(place)[0](mx.array(ids.numpy())).astype(mx.float32)
    return float((torch.tensor(np.array(found))[0].log_softmax(-1) - expected).abs().max())


saved = difference()
config = json.loads((place / "config.json").read_text())
assert "rope_theta" not in config, "the behaviour changed: transformers writes rope_theta"
(place / "config.json").write_text(json.dumps({**config, "rope_theta": 500_000.0}))
written = difference()
print(f"as saved: {saved:.3g}; with rope_theta: {written:.3g}")
assert written < 1e-3 < 0.1 < saved, "the behaviour changed"
EOF
