"""MHA and GQA to MLA: a few rotary slots shared by all heads, and one latent for everything else.

Legend: attention.py and metric.py; M rows of a band, that is pairs of heads.

A *slot* is one complex key dimension that turns at a frequency φ and is shared by all heads. Any
complex-linear map across heads at one frequency commutes with RoPE and folds into W_Q and W_K, so a slot
carries the best complex rank one of all heads' keys near its frequency; a real orthogonal map could not undo
the phases between heads. The part of the keys without a slot is kept without rotation: over the distances Δ
that attention spans, e^(-i f Δ) is replaced by its mean ρ(f). These keys and the values then share the latent
of least weighted squared error. Last, every head's queries are fitted to the resulting keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..algebra.attention import Attention, LatentAttention
from ..algebra.metric import LayerMetric, with_bias
from ..algebra.queries import fit_queries
from ..algebra.rotary import complex_rows, half_rows, interleaved_rows
from ..algebra.spectrum import spectrum
from ..algebra.subspaces import leading, low_rank
from ..algebra.target import LatentTarget


@dataclass(frozen=True, kw_only=True)
class Band:
    """Slots of one frequency, and the source's rotary pairs that they serve.

    Attributes:
        frequency: φ, radians per token.
        pairs: numbers of the source's pairs.
        slots: how many.
        table: number of the rotary table that it belongs to, where layers have different ones.
    """

    frequency: float
    pairs: tuple[int, ...]
    slots: int
    table: int = 0


def uniform_bands(frequencies_F: Tensor, slots_S: Tensor) -> tuple[Band, ...]:
    """Return a slot at each frequency of a table.

    Each serves the same number of the source's pairs, in order.
    """
    pairs = len(frequencies_F)
    slots = len(slots_S)
    members: list[list[int]] = [[] for _ in range(slots)]
    for pair in range(pairs):
        members[pair * slots // pairs].append(pair)
    return tuple(
        Band(frequency=f, pairs=tuple(members[slot]), slots=1) for slot, f in enumerate(slots_S.tolist())
    )


def source_bands(frequencies_F: Tensor, heads: int) -> tuple[Band, ...]:
    """Return as many slots at each of the source's frequencies as it has key heads.

    Nothing is lost and nothing saved.
    """
    return tuple(
        Band(frequency=f, pairs=(pair,), slots=heads) for pair, f in enumerate(frequencies_F.tolist())
    )


def to_mla(
    attention: Attention,
    target: LatentTarget,
    frequencies_F: Tensor,
    bands: tuple[Band, ...],
    metric: LayerMetric,
) -> LatentAttention:
    """Fold one layer to multi-head latent attention.

    Args:
        attention: the source's weights, float64.
        target: widths; `slots == "source"` keeps every head's every pair and is exact.
        frequencies_F: the source's angular frequencies, float64.
        bands: the slots, `qk_rope_head_dim / 2` in all.
        metric: what errors cost.
    """
    if target.slots == "source":
        return _exact(attention)
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    width = attention.k_KHD.shape[-1]
    parts = separate(Keys.of(attention, metric), frequencies_F, bands, metric)
    down_CD, up, energy_M = low_rank(*parts.stack(attention, metric), target.kv_lora_rank)
    k_KHE = with_bias(attention.k_KHD, attention.k_KH)
    q_NHE = with_bias(attention.q_NHD, attention.q_NH)
    slots_S = torch.tensor([band.frequency for band in bands for _ in range(band.slots)], dtype=torch.float64)
    latent_CE = pad(down_CD, (0, k_KHE.shape[-1] - width))
    slots_NRH, latent_NCH = fit_queries(
        k_KHE, frequencies_F, parts.k_rope_RE, slots_S, latent_CE, queries, metric
    )
    q_rope_NRE = slots_NRH @ q_NHE
    return LatentAttention(
        q_nope_NPA=attention.q_NHD,
        q_rope_NRA=q_rope_NRE[..., :width],
        q_nope_NP=attention.q_NH,
        q_rope_NR=None if attention.q_NH is None else q_rope_NRE[..., -1],
        down_CD=down_CD,
        k_up_NPC=latent_NCH.mT,
        v_up_NHC=up.unflatten(0, (2, len(attention.k_KHD), -1))[1].repeat_interleave(queries, 0),
        k_rope_RD=parts.k_rope_RE[..., :width],
        k_rope_R=None if attention.k_KH is None else parts.k_rope_RE[..., -1],
        o_DNH=attention.o_DNH,
        o_D=output_bias(attention),
        gate_NHD=attention.gate_NHD,
        gate_NH=attention.gate_NH,
        scale=attention.scale,
        spectrum=spectrum(energy_M),
    )


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A layer's keys as complex rows, with what does not depend on the slots that they are given.

    Attributes:
        z_KFE: the keys.
        seen_KFE: z C, their images under the input's moment.
        pairs_FKK: G at each rotary pair, complex.
    """

    z_KFE: Tensor
    seen_KFE: Tensor
    pairs_FKK: Tensor

    @classmethod
    def of(cls, attention: Attention, metric: LayerMetric) -> "Keys":
        """Return the keys of a layer in its metric."""
        k_KHE = with_bias(attention.k_KHD, attention.k_KH)
        moment_EE = metric.moment(k_KHE)
        z_KFE = complex_rows(k_KHE)
        seen_KFE = z_KFE if moment_EE is None else complex_rows(k_KHE @ moment_EE)
        return cls(z_KFE=z_KFE, seen_KFE=seen_KFE, pairs_FKK=metric.pairs(len(k_KHE)))

    def weighted(
        self, frequencies_F: Tensor, band: Band, metric: LayerMetric
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a band's rows (M, E), their error costs without a slot (M, M), and their images (M, E).

        Rows are pair-major.
        """
        heads = len(self.z_KFE)
        members = list(band.pairs)
        turned_NM = metric.fidelity(frequencies_F[members] - band.frequency).abs().square()
        # A slot saves the rotation that the mean over distances loses; a slow pair loses next to
        # nothing.
        saved_NM = (turned_NM - metric.fidelity(frequencies_F[members]).abs().square()).clamp(min=1e-6)
        root_KM = saved_NM.unflatten(0, (heads, -1)).mean(1).sqrt()
        blocks = (
            root_KM[:, m, None] * self.pairs_FKK[pair] * root_KM[:, m] for m, pair in enumerate(members)
        )
        rows_ME, seen_ME = (
            rows[:, members].transpose(0, 1).flatten(0, 1) for rows in (self.z_KFE, self.seen_KFE)
        )
        return rows_ME, torch.block_diag(*blocks), seen_ME


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Keys in the slots, what is left of them without rotation, and what an error in that costs."""

    k_rope_RE: Tensor
    k_nope_KPE: Tensor
    key_BSS: Tensor

    def stack(self, attention: Attention, metric: LayerMetric) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the rows that go into the latent, their metric, and the second moment of the input.

        The rows are those of un-rotated keys, then values.
        """
        # A constant added to an un-rotated key shifts all scores of a query alike: softmax does not see it,
        # so its bias goes.
        keys_KPD = self.k_nope_KPE[..., : attention.k_KHD.shape[-1]]
        moment_DD = None if metric.input_EE is None else metric.input_EE[:-1, :-1]
        return (
            torch.cat([keys_KPD, attention.v_KHD]).flatten(0, 1),
            torch.cat([self.key_BSS, metric.value_BSS]),
            moment_DD,
        )


def separate(keys: Keys, frequencies_F: Tensor, bands: tuple[Band, ...], metric: LayerMetric) -> Parts:
    """Give every band the best share of the keys near its frequency.

    The rest of the keys stays, un-rotated.
    """
    heads = len(keys.z_KFE)
    still_NF = metric.fidelity(frequencies_F)
    rest_KFE = keys.z_KFE.clone()
    k_slots = []
    for band in bands:
        members = list(band.pairs)
        keys_RE, shares, _ = leading(*keys.weighted(frequencies_F, band, metric), band.slots)
        shares_MKR = shares.unflatten(0, (len(members), heads))
        rest_KFE[:, members] -= (shares_MKR @ keys_RE).transpose(0, 1)
        k_slots.append(keys_RE)
    still_KF = still_NF.abs().square().unflatten(0, (heads, -1)).mean(1).sqrt()
    damping_BS = torch.cat([still_KF, still_KF], -1).view(metric.key_BSS.shape[:2])
    return Parts(
        k_rope_RE=interleaved_rows(torch.cat(k_slots)),
        k_nope_KPE=half_rows(rest_KFE),
        key_BSS=damping_BS[:, :, None] * metric.key_BSS * damping_BS[:, None, :],
    )


def saved_by_slots(attention: Attention, frequencies_F: Tensor, metric: LayerMetric) -> Tensor:
    """Return what the first, second, ... slot at each source frequency saves (F, K).

    It is in the metric's unit and falls along K.
    """
    keys = Keys.of(attention, metric)
    saved = []
    for band in source_bands(frequencies_F, len(keys.z_KFE)):
        _, _, energy_K = leading(*keys.weighted(frequencies_F, band, metric), band.slots)
        saved.append(energy_K / 2)  # a complex error counts half in each of its real parts
    return torch.stack(saved)


def lost_by_slots(
    attention: Attention, frequencies_F: Tensor, bands: tuple[Band, ...], metric: LayerMetric
) -> float:
    """Return the loss of the keys' rotation with these slots.

    It is in nats per token where the metric comes from data. A part without a slot loses what averaging over
    distances loses of its rotation. A part in a slot of another frequency loses the fidelity of that
    frequency.
    """
    keys = Keys.of(attention, metric)
    lost = 0.0
    for band in bands:
        rows_ME, weight_MM, seen_ME = keys.weighted(frequencies_F, band, metric)
        _, _, energy_M = leading(rows_ME, weight_MM, seen_ME, band.slots)
        lost += float(energy_M[band.slots :].sum())
        off_NM = 1 - metric.fidelity(frequencies_F[list(band.pairs)] - band.frequency).abs().square()
        off_KM = off_NM.unflatten(0, (len(keys.z_KFE), -1)).mean(1)
        size_KM = (seen_ME * rows_ME.conj()).sum(-1).real.view(len(band.pairs), -1).T
        lost += float(
            (off_KM * size_KM * keys.pairs_FKK[list(band.pairs)].diagonal(dim1=1, dim2=2).real.T).sum()
        )
    return lost / 4  # a complex error counts half in each of its real parts; the quadratic form's ½


def _exact(attention: Attention) -> LatentAttention:
    """Give every pair of every key head its own slot, and keep every value in the latent.

    The function is the same, and nothing is saved.
    """
    heads = len(attention.k_KHD)
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    owner_NK = torch.eye(heads, dtype=attention.q_NHD.dtype).repeat_interleave(queries, 0)

    def spread(rows: Tensor) -> Tensor:
        """Return query rows (N, H, E) at the slots of their own key head, pair-major: (N, 2FK, E)."""
        return interleaved_rows((complex_rows(rows)[:, :, None] * owner_NK[:, None, :, None]).flatten(1, 2))

    def slots(rows: Tensor) -> Tensor:
        """Return key rows (K, H, E) as slots, pair-major: (2FK, E)."""
        return interleaved_rows(complex_rows(rows).transpose(0, 1).flatten(0, 1))

    width = attention.v_KHD.shape[1]
    v_up_NHC = torch.einsum("nk,hg->nhkg", owner_NK, torch.eye(width, dtype=owner_NK.dtype)).flatten(2)
    return LatentAttention(
        q_nope_NPA=attention.q_NHD[:, :0],
        q_rope_NRA=spread(attention.q_NHD),
        q_nope_NP=None if attention.q_NH is None else attention.q_NH[:, :0],
        q_rope_NR=None if attention.q_NH is None else spread(attention.q_NH[..., None]).squeeze(-1),
        down_CD=attention.v_KHD.flatten(0, 1),
        k_up_NPC=v_up_NHC[:, :0],
        v_up_NHC=v_up_NHC,
        k_rope_RD=slots(attention.k_KHD),
        k_rope_R=None if attention.k_KH is None else slots(attention.k_KH[..., None]).squeeze(-1),
        o_DNH=attention.o_DNH,
        o_D=output_bias(attention),
        gate_NHD=attention.gate_NHD,
        gate_NH=attention.gate_NH,
        scale=attention.scale,
    )


def output_bias(attention: Attention) -> Tensor | None:
    """Return the output's bias with the value bias, a constant because attention weights sum to one."""
    if attention.v_KH is None:
        return attention.o_D
    assert attention.gate_NHD is None, "the rows of families with gates need projections without biases"
    queries = len(attention.q_NHD) // len(attention.v_KHD)
    constant_D = torch.einsum("dnh,nh->d", attention.o_DNH, attention.v_KH.repeat_interleave(queries, 0))
    return constant_D if attention.o_D is None else constant_D + attention.o_D
