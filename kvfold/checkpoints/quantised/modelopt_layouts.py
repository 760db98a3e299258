"""The layouts of ModelOpt: FP8 with a scale per tensor or row, and NVFP4.

What they share with compressed-tensors is read by the same functions; NVFP4's scale of the whole tensor is
its inverse here.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ...core.errors import InvalidInput
from ...core.untrusted import shorten
from .compressed import fp4_weight
from .packed_tensor import FP8, PackedTensor, StoredTensors
from .scaled_numbers import find_fp8

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")


def find_modelopt(stored: StoredTensors, config: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """Return the weights of `quant_method: modelopt`.

    Raises:
        InvalidInput: the configuration names an algorithm that kvfold does not read, or parts are missing or
            misshapen.
    """
    nested = config.get("quantization")
    algorithm = (nested if isinstance(nested, dict) else config).get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise InvalidInput(
            f"{stored.directory} has the ModelOpt quant_algo {shorten(algorithm)}; kvfold reads "
            f"{', '.join(ALGORITHMS)}"
        )
    for module in stored.ending(".pre_quant_scale"):
        raise InvalidInput(
            f"{stored.directory} has {module}.pre_quant_scale, which scales inputs in ModelOpt's AWQ, but "
            "kvfold reads ModelOpt checkpoints without it"
        )
    found: dict[str, PackedTensor] = {}
    for name, spec in stored.specs.items():
        if name.endswith(".weight") and spec.dtype == torch.uint8:
            found[name] = fp4_weight(stored, name, name, f"{name}_scale_2", divides=False)
    fp8 = {
        name: spec for name, spec in stored.specs.items() if spec.dtype not in FP8 or name.endswith(".weight")
    }
    return found | find_fp8(StoredTensors(directory=stored.directory, specs=fp8, read=stored.read), {})
