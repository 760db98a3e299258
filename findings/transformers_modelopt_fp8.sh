#!/bin/sh
# transformers 5.24.0, torch 2.13.0, on a CPU, 2026-11-28.
#
# transformers has no reader for checkpoints that ModelOpt exports (quant_method "modelopt"), and does not refuse them:
# it warns that it will "skip the quantization", reports the scales as unexpected keys, and loads the stored FP8
# numbers as weights without their scales. The model loads and generates; its linear weights all reach 448. What helps:
# multiply each weight by its weight_scale before loading, or serve the checkpoint in vLLM or TensorRT-LLM.
#
# Below is a small random Llama in the layout of such an export: FP8 weights, a scale per tensor. Seen: the weights are
# 448 at most instead of 0.4, and logits are off by 3.8, where they have a standard deviation of 0.8.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet numpy transformers==5.24.0
"$work/venv/bin/python" - "$work/model" <<'EOF'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.1)).eval()
model.save_pretrained(place)
weights = load_file(place / "model.safetensors")
for name in [name for name in weights if name.endswith("_proj.weight")]:
    scale = weights[name].abs().max() / 448
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
    weights[name + "_scale"] = scale.clone()
    weights[name.replace("weight", "input_scale")] = torch.tensor(0.01)
save_file(weights, place / "model.safetensors", {"format": "pt"})
config = json.loads((place / "config.json").read_text())
producer = {"name": "modelopt", "version": "0.47.0"}
config["quantization_config"] = {
    "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": producer
}
(place / "config.json").write_text(json.dumps(config))

loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
largest = [float(m.model.layers[0].self_attn.q_proj.weight.abs().max()) for m in (model, loaded)]
ids = torch.arange(40)[None]
with torch.no_grad():
    off = float((loaded(input_ids=ids).logits - model(input_ids=ids).logits).abs().max())
print(f"largest weight {largest[0]:.3g}, loaded as {largest[1]:.3g}; logits off by {off:.3g}")
assert largest[1] == 448 and off > 1, "the behaviour changed"
EOF
