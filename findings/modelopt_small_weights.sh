#!/bin/sh
# ModelOpt 0.47.0 (nvidia-modelopt), torch 2.13.0, on a CPU, 2026-11-28.
#
# Formats with a scale round weights of 1e-6 as well as weights of 1. But if the largest weight behind a scale is at
# most 2**-24 (6e-8, the smallest number of float16), ModelOpt takes them all for zero, also in bfloat16 and float32,
# which hold such numbers. No warning says so. Weights that small are valid before a norm or before large weights:
# the model works until it is quantised.
#
# Seen, for two linear layers whose sizes cancel, s * A and B / s: the relative error of the result is 0.053 (FP8) and
# 0.014 (int8) for s from 1 to 1e-6, and 1.0 for 1e-7, where the result is zero.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet requests huggingface-hub nvidia-modelopt==0.47.0
"$work/venv/bin/python" - <<'EOF'
import modelopt.torch.quantization as mtq
import torch
from torch import nn

for name in ("FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG"):
    for size in (1, 1e-3, 1e-6, 1e-7):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        x = torch.randn(32, 64)
        with torch.no_grad():
            model[0].weight.mul_(size)
            model[1].weight.div_(size)
            expected = model(x)
            found = mtq.quantize(model, getattr(mtq, name), lambda copy: copy(x))(x)
        error = float((found - expected).norm() / expected.norm())
        print(f"{name}, weights times {size:g}: relative error {error:.3g}")
        assert error == 1 if size == 1e-7 else error < 0.1, "the behaviour changed"
EOF
