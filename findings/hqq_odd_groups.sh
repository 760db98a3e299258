#!/bin/sh
# hqq 0.2.8, torch 2.13.0, on a CPU, 2026-11-30.
#
# The one condition that hqq checks for a tensor is that the group divides its size. But with 4 bits along axis 1 an
# odd number of groups raises an error about sizes of tensors, because two groups share a byte. A QuantizedCache of
# transformers with this backend meets it wherever heads x tokens x width is an odd multiple of the group, so whether
# `generate` runs depends on the length of the prompt.
#
# Seen: 11 and 33 groups of 64 raise RuntimeError along axis 1; 22 groups, and 11 along axis 0, are quantised.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet hqq==0.2.8
"$work/venv/bin/python" - <<'EOF'
import torch
from hqq.core.quantize import Quantizer

torch.manual_seed(0)
for tokens, axis, works in ((16, 1, False), (16, 0, True), (48, 1, False), (32, 1, True)):
    x = torch.randn(1, 1, tokens, 44)
    try:
        packed, meta = Quantizer.quantize(
            x, nbits=4, group_size=64, axis=axis, compute_dtype=torch.float32, device="cpu"
        )
        seen = f"off by {float((Quantizer.dequantize(packed, meta) - x).abs().max()):.3g}"
    except RuntimeError as error:
        seen = f"RuntimeError: {error}"
    print(f"{x.numel() // 64} groups along axis {axis}: {seen}")
    assert works == ("RuntimeError" not in seen), "the behaviour changed"
EOF
