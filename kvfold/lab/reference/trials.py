"""Time, memory and output distances of the variants when they run.

Legend: modules.py.
"""

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ...eval.suites.meter import peak_memory, timed
from .modules import TokenCache

REPEATS = 5


@dataclass(frozen=True)
class Trial:
    """One forward pass.

    Attributes:
        name: of the variant.
        device: it ran on.
        tokens: new ones (prefill), or those in the cache (decode).
        prefill_seconds: median over repeats of one sequence of that many tokens.
        decode_seconds: the same, of one token behind that many; the cache, which it joins, grows over the
            repeats.
        peak_bytes: most that tensors made by the prefill took at once, without the weights.
    """

    name: str
    device: str
    tokens: int
    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int


@torch.no_grad()
def run(name: str, module: nn.Module, d_model: int, tokens: int, device: str) -> Trial:
    """Run a causal module of this package on random tokens, after one run to warm up."""
    place = torch.device(device)
    module = module.to(place)
    dtype = next(module.parameters()).dtype
    input_BTD = torch.randn(1, tokens + 1, d_model, device=place, dtype=dtype)
    first_BTD, next_BTD = input_BTD[:, :tokens], input_BTD[:, tokens:]
    cache = TokenCache()
    module(first_BTD, cache=cache)
    with peak_memory(place) as peak:
        module(first_BTD)
    prefill = median(timed(place, lambda: module(first_BTD))[1] for _ in range(REPEATS))
    decode = median(timed(place, lambda: module(next_BTD, cache=cache))[1] for _ in range(REPEATS))
    return Trial(name, device, tokens, prefill, decode, peak.bytes)


@torch.no_grad()
def distances(module: nn.Module, source: nn.Module, input_BTD: Tensor) -> dict[str, float]:
    """Return `relative_l2` ‖y - ŷ‖/‖y‖ over all tokens, and `cosine_distance` 1 - cos(y, ŷ).

    The latter is a mean over tokens.
    """
    wanted_BTD = source(input_BTD)
    got_BTD = module(input_BTD)
    relative = float((got_BTD - wanted_BTD).norm() / wanted_BTD.norm())
    cosine = nn.functional.cosine_similarity(got_BTD.double(), wanted_BTD.double(), dim=-1)
    return {"relative_l2": relative, "cosine_distance": max(0.0, float(1 - cosine.mean()))}
