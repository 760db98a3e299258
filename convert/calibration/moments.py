"""Moments of a layer's forward and backward pass: one table of them, and the hooks that feed it.

A *quantity* is what one batch leaves in a layer: `x` the attention's input, `q`, `k`, `v`, `o` the outputs of
its projections, `p` its probabilities; `g_` before a name is the gradient of the log likelihood there. A
moment is computed as soon as the quantities it needs have arrived, and a quantity is dropped when no moment
waits for it. Both modes, whole model and layer by layer, use this file: a new statistic is a row in
`MOMENTS` and a field of `LayerStatistics`. `SAMPLES` names quantities of which the first sequences are kept
as they are, never more than a fixed number of tokens.

Legend: statistics.py; I = N or K heads.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.errors import InvalidInput
from ...core.processes import gather_rows, place, sum_over_ranks
from .statistics import LayerStatistics

# Blocks to a side of a moment. More blocks save little more of its products, of which 9/16 are left, and make
# them smaller.
BLOCKS = 8


@dataclass(frozen=True)
class Moment:
    """A sum over tokens.

    Attributes:
        needs: the quantities it is computed from, in the order of `reduce`'s arguments: x (B, T, D); q, k, v
            and their gradients (B, T, I, H), before RoPE; p and its gradient (B, N, T, T), queries by keys.
        reduce: a batch's sum; one of rows in float64 on the CPU and float32 on an accelerator.
        mean: from the sum over all batches and the number of tokens to what is kept.
    """

    needs: tuple[str, ...]
    reduce: Callable[..., Tensor]
    mean: Callable[[Tensor, int], Tensor] = torch.div

    @property
    def backward(self) -> bool:
        """True where it needs a gradient."""
        return any(quantity.startswith("g_") for quantity in self.needs)


def _precise(rows: Tensor) -> Tensor:
    """Convert to float64 on the CPU, and to float32 on an accelerator, where its products are much faster."""
    return rows.to(torch.float64 if rows.device.type == "cpu" else torch.float32)


def _moment(rows_XE: Tensor) -> Tensor:
    """Compute Σ x xᵀ over a batch's tokens; of symmetric blocks one is computed."""
    rows_XE = _precise(rows_XE)
    width = rows_XE.shape[1]
    moment_EE, step = rows_XE.new_empty(width, width), -(-width // BLOCKS)
    for first in range(0, width, step):
        block = slice(first, first + step)
        onward = rows_XE[:, block].mT @ rows_XE[:, first:]
        moment_EE[block, first:] = onward
        moment_EE[first:, block] = onward.mT
    return moment_EE


def _fisher(g_BTIH: Tensor) -> Tensor:
    return _moment(g_BTIH.flatten(2).flatten(0, 1))


def _by_head(rows_BTNH: Tensor) -> Tensor:
    rows_NXH = _precise(rows_BTNH.flatten(0, 1).transpose(0, 1))
    return rows_NXH.mT @ rows_NXH


def _by_distance(mass_NTT: Tensor) -> Tensor:
    """Sum (N, query, key) over the diagonals query - key = Δ, to (N, T).

    Keys are reversed and rows made one element longer than they are read again: each row moves one to the
    right of the last.
    """
    heads, length, _ = mass_NTT.shape
    skewed = pad(mass_NTT.flip(-1), (0, length)).flatten(1)[:, : length * (2 * length - 1)]
    return skewed.view(heads, length, -1).sum(1, dtype=torch.float64)[:, length - 1 :]


def _at_first(p_BNTT: Tensor) -> Tensor:
    """Sum the mass p(1-p) at the first key by distance, and that at all keys in a last column, (N, T+1)."""
    first_NT = ((1 - p_BNTT[..., 0]) * p_BNTT[..., 0]).sum(0, dtype=torch.float64)
    whole_N = (p_BNTT.sum(-1) - p_BNTT.square().sum(-1)).sum((0, 2), dtype=torch.float64)
    return torch.cat([first_NT, whole_N[:, None]], 1)


def _share_at_first(mass_NT: Tensor, tokens: int) -> Tensor:
    whole_N1 = mass_NT[:, -1:]
    return torch.where(whole_N1 > 0, mass_NT[:, :-1] / whole_N1, 0)


def _shares(mass_NT: Tensor, tokens: int) -> Tensor:
    # Attention that is always certain has no such mass. Then all distances get the same share.
    mass_NT = torch.where(mass_NT.sum(-1, keepdim=True) > 0, mass_NT, 1)
    return mass_NT / mass_NT.sum(-1, keepdim=True)


MOMENTS = {
    "input_EE": Moment(("x",), lambda x_BTD: _moment(pad(x_BTD.flatten(0, 1), (0, 1), value=1))),
    "query_NHH": Moment(("q",), _by_head),
    "key_fisher": Moment(("g_k",), _fisher),
    "value_fisher": Moment(("g_v",), _fisher),
    "query_fisher": Moment(("g_q",), _by_head),
    "output_fisher": Moment(("g_o",), lambda g_BTD: _moment(g_BTD.flatten(0, 1))),
    "distance_NT": Moment(("p",), lambda p_BNTT: _by_distance((1 - p_BNTT).mul_(p_BNTT).sum(0)), _shares),
    "first_key_fisher": Moment(("g_k",), lambda g_BTKH: _fisher(g_BTKH[:, :1])),
    "first_value_fisher": Moment(("g_v",), lambda g_BTKH: _fisher(g_BTKH[:, :1])),
    "first_NT": Moment(("p",), _at_first, _share_at_first),
}
SAMPLES = {
    "input_BTD": ("x", 2**15),
    "output_BTD": ("o", 1),
}  # the quantity, and tokens at most, but always one sequence
WANTED = frozenset(quantity for moment in MOMENTS.values() for quantity in moment.needs)


class Sums(dict[str, Tensor]):
    """One layer's sums over tokens by moment, float64, on the CPU: nothing here grows with the tokens.

    Attributes:
        held: quantities of the present batch that a moment still waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arrived: set[str] = set()
        self._kept: dict[str, list[Tensor]] = {name: [] for name in SAMPLES}
        self.held: dict[str, Tensor] = {}

    def arrive(self, quantity: str, value: Tensor) -> None:
        """Add a quantity, once per batch; moments that have all they need are summed."""
        for name, (sampled, tokens) in SAMPLES.items():
            if quantity == sampled:
                self._keep(name, value.detach(), tokens)
        if quantity not in WANTED:
            return
        self._arrived.add(quantity)
        self.held[quantity] = value.detach()
        for name, moment in MOMENTS.items():
            if quantity in moment.needs and self._arrived.issuperset(moment.needs):
                self._add(name, moment.reduce(*(self.held[need] for need in moment.needs)))
        waiting = [moment.needs for moment in MOMENTS.values() if not self._arrived.issuperset(moment.needs)]
        self.held = {
            name: kept for name, kept in self.held.items() if any(name in needs for needs in waiting)
        }
        if self._arrived == WANTED:
            self._arrived.clear()  # the next batch begins

    def _keep(self, name: str, value_BTD: Tensor, tokens: int) -> None:
        """Keep those sequences of a batch that are among the first of all processes."""
        rank, ranks = place()
        here = len(range(rank, max(1, tokens // value_BTD.shape[1]), ranks)) - sum(map(len, self._kept[name]))
        self._kept[name].append(value_BTD[: max(0, here)].to("cpu", torch.bfloat16))

    def _add(self, name: str, value: Tensor) -> None:
        value = value.to("cpu", torch.float64).contiguous()
        self[name] = self[name].add_(value) if name in self else value

    def check_finite(self, layer: int, *, backward: bool) -> None:
        """Check that the moments of a pass are finite."""
        for name, moment in MOMENTS.items():
            total = self[name]
            # A second moment that is not finite shows it on its diagonal.
            seen = total.diagonal(dim1=-2, dim2=-1) if total.shape[-1] == total.shape[-2] else total
            if moment.backward == backward and not seen.isfinite().all():
                raise InvalidInput(not_finite(layer, name))

    def over_ranks(self) -> None:
        """Sum over the processes of a distributed run."""
        for name in sorted(self):
            self[name] = sum_over_ranks(self[name])
        for name, kept in self._kept.items():
            own = torch.cat(kept)
            self._kept[name] = [gather_rows(own, int(sum_over_ranks(torch.tensor(len(own)))))]

    def means(self, tokens: int) -> LayerStatistics:
        """Return the statistics of a layer, from sums over so many tokens."""
        means = {name: moment.mean(self[name], tokens) for name, moment in MOMENTS.items()}
        return LayerStatistics(**means, **{name: torch.cat(kept) for name, kept in self._kept.items()})


def not_finite(layer: int, what: str) -> str:
    """Return the sentence for a source whose numbers overflow."""
    return (
        f"layer {layer} of the source gives statistics that are NaN or infinite ({what}); "
        "check its weights, or fold with --calibration none"
    )


@dataclass(frozen=True)
class Layout:
    """The places of a model's quantities.

    Attributes:
        projections: a layer's projections by role, as `Family.projections` gives them: q, k, v and o, or qkv
            and o.
        split: from a layer, a role and the output (B, T, C) of its projection to the parts: q (B, T, N, H), k
            and v (B, T, K, H), in the half layout.
        layers: the numbers of the layers that attend.
    """

    projections: Callable[[int], Mapping[str, str]]
    split: Callable[[int, str, Tensor], Mapping[str, Tensor]]
    layers: tuple[int, ...]


@contextmanager
def watched(model: Any, layers: Mapping[int, Sums], layout: Layout) -> Iterator[None]:
    """Observe projections and attention of some layers for the duration; weights get no gradients."""
    assert not model.training, "dropout would be part of the statistics"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as stack, torch.enable_grad():
        stack.callback(lambda: [parameter.requires_grad_(True) for parameter in trained])
        for parameter in trained:
            parameter.requires_grad_(False)
        for number, sums in layers.items():
            for hook in _hook_layer(model, sums, layout.projections(number), partial(layout.split, number)):
                stack.callback(hook.remove)
        yield


def _hook_layer(
    model: Any, sums: Sums, names: Mapping[str, str], split: Callable[..., Mapping[str, Tensor]]
) -> Iterator[Any]:
    """Register a layer's hooks; yields their handles."""
    roles = [role for role in names if role != "o"]
    first = model.get_submodule(names[roles[0]])
    yield first.register_forward_pre_hook(lambda _, inputs: sums.arrive("x", inputs[0]))
    for role in roles:
        yield model.get_submodule(names[role]).register_forward_hook(
            partial(_see_projection, sums, partial(split, role))
        )

    def see_output(_: Any, inputs: Any, output_BTD: Tensor) -> None:
        output_BTD.register_hook(partial(sums.arrive, "g_o"))
        sums.arrive("o", output_BTD)

    def see_attention(_: Any, inputs: Any, output: tuple[Any, ...]) -> None:
        p_BNTT = output[1]
        assert p_BNTT is not None, "attention probabilities are seen with attn_implementation='eager' only"
        p_BNTT.register_hook(partial(sums.arrive, "g_p"))
        sums.arrive("p", p_BNTT)

    yield model.get_submodule(names["o"]).register_forward_hook(see_output)
    attention = model.get_submodule(names["o"].rpartition(".")[0])
    yield attention.register_forward_hook(see_attention)


def _see_projection(
    sums: Sums, split: Callable[[Tensor], Mapping[str, Tensor]], _: Any, inputs: Any, output_BTC: Tensor
) -> Tensor:
    def arrive(prefix: str, values_BTC: Tensor) -> None:
        for role, value_BTIH in split(values_BTC).items():
            sums.arrive(prefix + role, value_BTIH)

    output_BTC.requires_grad_()  # in the first layer nothing else makes the graph begin
    output_BTC.register_hook(partial(arrive, "g_"))
    arrive("", output_BTC.detach())
    return output_BTC.clone()  # which some classes bound in place
