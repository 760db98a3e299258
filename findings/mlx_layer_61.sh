#!/bin/sh
# mlx-lm 0.32.2, mlx 0.32.4, transformers 5.24.0, torch 2.13.0, on a CPU, 2026-11-28.
#
# DeepSeek-V3 has 61 layers and, in its published file, a 62nd for predicting several tokens. mlx-lm leaves that one
# out by its name: every tensor of `model.layers.61`, whatever num_hidden_layers says. So a model of this class with 62
# layers or more does not load.
#
# Seen: 61 layers load; of 62 a ValueError lists the parameters of model.layers.61 as missing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet transformers==5.24.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
"$work/venv/bin/python" - "$work" <<'EOF'
import sys
from pathlib import Path

from mlx_lm.utils import load_model
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

heads = {"q_lora_rank": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
for layers in (61, 62):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers}
    config = DeepseekV3Config(
        num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=layers, **heads, **experts, **sizes
    )
    place = Path(sys.argv[1]) / str(layers)
    DeepseekV3ForCausalLM(config).save_pretrained(place)
    try:
        load_model(place)
    except ValueError as error:
        print(layers, str(error)[:120])
        assert layers == 62 and "model.layers.61." in str(error), "the behaviour changed"
    else:
        assert layers == 61, "the behaviour changed: 62 layers load"
EOF
