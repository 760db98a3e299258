#!/bin/sh
# torchao 0.18.0, torch 2.13.0, on a CPU, 2026-11-28.
#
# A module that torchao quantised is still exactly an nn.Linear. Its weight is an instance of nn.Parameter, has the
# shape and dtype from before, says that it is floating point, and reports the bytes of float32. Code that asks these
# questions before it multiplies a weight itself (absorbed latent attention, merging, low-rank updates) takes it for a
# plain matrix, and the first product raises an error. type(weight) shows the difference: it is torchao's own class, and
# nn.Parameter for a plain weight. weight.dequantize() returns a plain matrix.
#
# Seen for int8 weights: slices, copies and linear() work; view, einsum, matmul, addition, norm, split, cat and equal
# raise NotImplementedError.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
"$work/venv/bin/pip" install --quiet numpy torchao==0.18.0
"$work/venv/bin/python" - <<'EOF'
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

layer = nn.Linear(64, 32, bias=False)
assert type(layer.weight) is nn.Parameter
quantize_(layer, Int8WeightOnlyConfig())
weight, x = layer.weight, torch.ones(2, 64)
facts = [type(layer) is nn.Linear, isinstance(weight, nn.Parameter), weight.is_floating_point()]
facts += [weight.dtype == torch.float32, weight.shape == (32, 64), weight.nbytes == 32 * 64 * 4]
assert all(facts) and type(weight) is not nn.Parameter, f"the behaviour changed: {facts}, {type(weight)}"
operations = {
    "slice": lambda: weight[:8],
    "clone": lambda: weight.clone(),
    "linear": lambda: nn.functional.linear(x, weight),
    "dequantize": lambda: x @ weight.dequantize().t(),
    "view": lambda: weight.view(4, 8, 64),
    "einsum": lambda: torch.einsum("oi,bi->bo", weight, x),
    "matmul": lambda: x @ weight.mT,
    "add": lambda: weight + 0,
    "norm": lambda: weight.norm(),
    "split": lambda: weight.split(8),
    "cat": lambda: torch.cat([weight, weight]),
    "equal": lambda: torch.equal(weight, weight),
}
refused = []
for name, operation in operations.items():
    try:
        operation()
    except NotImplementedError:
        refused.append(name)
print(f"{type(weight)} refuses {', '.join(refused)}")
assert refused == list(operations)[4:], "the behaviour changed"
EOF
