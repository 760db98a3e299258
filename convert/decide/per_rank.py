"""Elements of the cache that each rank of a tensor-parallel engine holds.

Key/value heads are divided over the ranks, and repeated where there are fewer heads than ranks. A latent is
one head, so every rank holds all of it. Decode context parallelism divides the tokens of repeated heads: at
most by ranks / heads (vLLM, docs/serving/context_parallel_deployment.md at 020505c, read 2026-11-22; SGLang
0.5.23, models/deepseek_v2.py: one key/value head on every rank).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import InvalidInput
from ..algebra.target import Geometry, GroupedTarget, Target

REPEATING = ("vllm", "vllm+kvfold", "sglang")  # engines that do this, by their source
_MOST = 8  # ranks that a sentence looks at: one machine's


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that serve a model.

    Attributes:
        tensor: of tensor parallelism (`--tp`).
        context: of decode context parallelism (`--dcp`), which divides the same ranks.
    """

    tensor: int = 1
    context: int = 1

    def check(self, geometry: Geometry) -> None:
        """Refuse ranks that no engine can form."""
        heads = geometry.num_attention_heads
        if heads % self.tensor:
            raise InvalidInput(
                f"--tp {self.tensor} does not divide the {heads} attention heads; choose a divisor of {heads}"
            )
        if self.tensor % self.context:
            raise InvalidInput(
                f"--dcp {self.context} does not divide --tp {self.tensor}; choose a divisor of {self.tensor}"
            )

    def hold(self, heads: int, elements: int) -> int:
        """Return the elements per token and layer that one rank holds; a latent is one head."""
        own = elements // heads * math.ceil(heads / self.tensor)
        return math.ceil(own / min(self.context, max(1, self.tensor // heads)))


def rank_elements(target: Target, geometry: Geometry, cached: int, ranks: Ranks) -> int:
    """Return the elements per token and layer that one rank holds of a fold that caches `cached` of them.

    Of one whose rotation is intact, engines with ranks cache keys and values whole.
    """
    if isinstance(target, GroupedTarget):
        return ranks.hold(target.num_key_value_heads, cached)
    if target.rope == "intact" and ranks.tensor > 1:
        return source_elements(geometry, ranks)
    return ranks.hold(1, cached)


def source_elements(geometry: Geometry, ranks: Ranks) -> int:
    """Return the elements per token and layer of the source that one rank holds."""
    return ranks.hold(geometry.num_key_value_heads, geometry.cache_elements)


def rank_notices(target: Target, geometry: Geometry, cached: int, engines: Sequence[str]) -> tuple[str, ...]:
    """Say from how many ranks on a latent takes no less than the source, in engines that repeat it."""
    repeating = [engine for engine in engines if engine in REPEATING]
    if not repeating or isinstance(target, GroupedTarget) or target.rope == "intact":
        return ()
    counts = [2**power for power in range(_MOST.bit_length()) if geometry.num_attention_heads % 2**power == 0]
    for count in counts:
        held = source_elements(geometry, Ranks(tensor=count))
        if held <= cached:
            context = Ranks(tensor=counts[-1], context=counts[-1])
            return (
                f"{' and '.join(repeating)}: every tensor-parallel rank holds the whole latent, {cached} "
                f"elements per token and layer, but only {held} of the source at TP {count}; from there on "
                f"the source, or --to gqa, is the better choice, unless decode context parallelism divides "
                f"the tokens ({context.hold(1, cached)} at TP {context.tensor} with DCP {context.context})",
            )
    return ()
