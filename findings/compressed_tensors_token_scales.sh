#!/bin/sh
# compressed-tensors 0.20.1, torch 2.13.0, on a CPU, 2026-11-28.
#
# FP8_DYNAMIC and W8A8 round activations with the strategy "token". One scale per token is what the name says, and what
# vLLM's kernels compute. The run-time code keeps a scale for each index of the first two dimensions. So it is one per
# token for an input (batch, tokens, features) only. It is one for all tokens of an input (tokens, features), as the
# experts of a layer get it, and one per sequence for (batch, 1, tokens, features), as `kv_b_proj` of DeepSeek-V3 gets
# it in transformers 5.15 and later. The tokens after a token then change how it is rounded, and decoding with a cache
# differs from decoding without.
#
# Below, only the last token is made larger. Seen: the largest change of the other 39 tokens' outputs is 0 for three
# dimensions, and 0.072 (FP8) and 2.0 (int8) for two and for four, where outputs have a standard deviation of 0.6.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet compressed-tensors==0.20.1
"$work/venv/bin/python" - <<'EOF'
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from torch import nn

for scheme, largest in (("FP8_DYNAMIC", 448), ("W8A8", 127)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    groups = {"all": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups))
    model[0].weight_scale.data = model[0].weight.detach().abs().amax(1, keepdim=True) / largest
    before = torch.randn(1, 40, 64)
    after = before.clone()
    after[:, -1] *= 1000
    for shape in ((1, 40, 64), (40, 64), (1, 1, 40, 64)):
        with torch.no_grad():
            made = [model(x.view(shape)).view(40, 32)[:-1] for x in (before, after)]
        change = float((made[0] - made[1]).abs().max())
        print(f"{scheme} {shape}: the other tokens change by {change:.3g}")
        assert (change == 0) == (len(shape) == 3), "the behaviour changed"
EOF
