"""MHA and GQA to MLA: a few rotary slots shared by all heads, and one latent for everything else.

Legend: attention.py and metric.py; M rows of a band, that is pairs of heads.

A *slot* is one complex key dimension that turns at a frequency φ and is shared by all heads. Any
complex-linear map across heads at one frequency commutes with RoPE and folds into W_Q and W_K, so a slot
carries the best complex rank one of all heads' keys near its frequency; a real orthogonal map could not undo
the phases between heads. The part of the keys without a slot is kept without rotation: over the distances Δ
that attention spans, e^(-i f Δ) is replaced by its mean ρ(f). These keys and the values then share the latent
of least weighted squared error. Last, every head's queries are fitted to the resulting keys.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.metric import LayerMetric, with_bias
from ..algebra.queries import fit_queries
from ..algebra.rotary import complex_rows, half_rows, interleaved_rows
from ..algebra.spectrum import spectrum
from ..algebra.subspaces import factor, leading, low_rank
from ..algebra.target import LatentTarget

NEAR = 2.0  # ratio of frequencies below which a slot may serve a pair


@dataclass(frozen=True, kw_only=True)
class Band:
    """Slots of one frequency, and the source's rotary pairs that they serve.

    Several bands may serve one pair, each what those before it left.

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


def uniform_bands(frequencies_F: Tensor, slots_S: Tensor, table: int = 0) -> tuple[Band, ...]:
    """Return a slot at each frequency of a table.

    Each serves the same number of the source's pairs, in order.
    """
    pairs, slots = len(frequencies_F), len(slots_S)
    members: list[list[int]] = [[] for _ in range(slots)]
    for pair in range(pairs):
        members[pair * slots // pairs].append(pair)
    return tuple(
        Band(frequency=f, pairs=tuple(members[slot]), slots=1, table=table)
        for slot, f in enumerate(slots_S.tolist())
    )


def source_bands(frequencies_F: Tensor, heads: int, table: int = 0) -> tuple[Band, ...]:
    """Return as many slots at each of the source's frequencies as it has key heads.

    Nothing is lost and nothing saved.
    """
    return tuple(
        Band(frequency=f, pairs=(pair,), slots=heads, table=table)
        for pair, f in enumerate(frequencies_F.tolist())
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
        spectrum=spectrum(energy_M),
        **behind_values(attention),
    )


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A layer's keys as complex rows, or what slots have left of them, with what an error in them costs.

    Attributes:
        z_KFE: the keys.
        seen_KFE: z C, their images under the input's moment.
        pairs_FKK: G at each rotary pair, complex.
        moment_EE: C; None: the identity.
    """

    z_KFE: Tensor
    seen_KFE: Tensor
    pairs_FKK: Tensor
    moment_EE: Tensor | None = None

    @classmethod
    def of(cls, attention: Attention, metric: LayerMetric) -> "Keys":
        """Return the keys of a layer in its metric."""
        k_KHE = with_bias(attention.k_KHD, attention.k_KH)
        moment_EE = metric.moment(k_KHE)
        z_KFE = complex_rows(k_KHE)
        seen_KFE = z_KFE if moment_EE is None else complex_rows(k_KHE @ moment_EE)
        return cls(z_KFE=z_KFE, seen_KFE=seen_KFE, pairs_FKK=metric.pairs(len(k_KHE)), moment_EE=moment_EE)

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

    def cost(self, kept_NF: Tensor) -> float:
        """Return what the keys cost if no more than ρ = `kept_NF` of their rotation is kept, in that unit."""
        lost_NF = 1 - kept_NF.abs().square()
        root_KF = lost_NF.unflatten(0, (len(self.z_KFE), -1)).mean(1).clamp(min=0).sqrt()
        weight_FKK = root_KF.T[:, :, None] * self.pairs_FKK * root_KF.T[:, None, :]
        return float((weight_FKK * self.inner().mT).sum().real)

    def inner(self) -> Tensor:
        """Return the products z C zᴴ of all heads at each pair (F, K, K)."""
        return torch.einsum("kfe,lfe->fkl", self.seen_KFE, self.z_KFE.conj())

    def saved_near(self, frequencies_F: Tensor, slots_S: Tensor, metric: LayerMetric) -> Tensor:
        """Return what slots save of the first, second, ... component of each pair (S, F, K).

        It is in the metric's unit, falls along K, and is 0 where frequencies differ by a factor of `NEAR`.
        """
        heads = len(self.z_KFE)
        ratio_SF = slots_S[:, None] / frequencies_F
        slot_X, pair_X = ((ratio_SF > 1 / NEAR) & (ratio_SF < NEAR)).nonzero(as_tuple=True)
        turned_NX = metric.fidelity(frequencies_F[pair_X] - slots_S[slot_X]).abs().square()
        still_NX = metric.fidelity(frequencies_F).abs().square()[:, pair_X]
        root_KX = (turned_NX - still_NX).clamp(min=0).unflatten(0, (heads, -1)).mean(1).sqrt()
        lower_XKK = factor(root_KX.T[:, :, None] * self.pairs_FKK[pair_X] * root_KX.T[:, None, :])
        energy_XK = torch.linalg.eigvalsh(lower_XKK.mH @ self.inner()[pair_X] @ lower_XKK)
        saved_SFK = torch.zeros(*ratio_SF.shape, heads, dtype=torch.float64)
        saved_SFK[slot_X, pair_X] = energy_XK.flip(-1).clamp(min=0) / 2  # as in saved_by_slots
        return saved_SFK

    def copy(self) -> "Keys":
        """Return a copy, so that `take` does not change these keys."""
        return replace(self, z_KFE=self.z_KFE.clone(), seen_KFE=self.seen_KFE.clone())

    def take(self, frequencies_F: Tensor, band: Band, metric: LayerMetric) -> tuple[Tensor, Tensor, Tensor]:
        """Take the part that a band's slots carry out of these keys, in place.

        Returns:
            The slots' keys (R, E); the part of the pairs that they carry (M, E), rows pair-major; and its
            images (M, E).
        """
        keys_RE, shares_MR, _ = leading(*self.weighted(frequencies_F, band, metric), band.slots)
        image_RE = keys_RE
        if self.moment_EE is not None:
            # The moment is real: as a complex matrix it would cost twice as much.
            image_RE = torch.complex(keys_RE.real @ self.moment_EE, keys_RE.imag @ self.moment_EE)
        taken_ME, seen_ME = shares_MR @ keys_RE, shares_MR @ image_RE
        for rows_KFE, gone_ME in ((self.z_KFE, taken_ME), (self.seen_KFE, seen_ME)):
            rows_KFE[:, list(band.pairs)] -= gone_ME.unflatten(0, (-1, len(rows_KFE))).transpose(0, 1)
        return keys_RE, taken_ME, seen_ME


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
    rest = keys.copy()
    k_slots = [rest.take(frequencies_F, band, metric)[0] for band in bands]
    still_NF = metric.fidelity(frequencies_F)
    still_KF = still_NF.abs().square().unflatten(0, (len(keys.z_KFE), -1)).mean(1).sqrt()
    damping_BS = torch.cat([still_KF, still_KF], -1).view(metric.key_BSS.shape[:2])
    return Parts(
        k_rope_RE=interleaved_rows(torch.cat(k_slots)),
        k_nope_KPE=half_rows(rest.z_KFE),
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
    rest = Keys.of(attention, metric).copy()
    lost = 0.0
    for band in bands:
        members = list(band.pairs)
        _, taken_ME, seen_ME = rest.take(frequencies_F, band, metric)
        carried_KFE, seen_KFE = (
            rows_ME.unflatten(0, (len(members), -1)).transpose(0, 1) for rows_ME in (taken_ME, seen_ME)
        )
        carried = Keys(z_KFE=carried_KFE, seen_KFE=seen_KFE, pairs_FKK=rest.pairs_FKK[members])
        lost += carried.cost(metric.fidelity(frequencies_F[members] - band.frequency))
    lost += rest.cost(metric.fidelity(frequencies_F))
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
        **behind_values(attention),
    )


def behind_values(layer: Attention | IntactAttention) -> dict[str, Any]:
    """Return the fields of a layer that a fold keeps; the value bias moves to the output's."""
    kept = {name: getattr(layer, name) for name in ("o_DNH", "gate_NHD", "gate_NH", "scale")}
    return {**kept, "o_D": output_bias(layer)}


def output_bias(layer: Attention | IntactAttention) -> Tensor | None:
    """Return the output's bias with the value bias, a constant because attention weights sum to one."""
    if layer.v_KH is None:
        return layer.o_D
    assert layer.gate_NHD is None, "the rows of families with gates need projections without biases"
    v_NH = layer.v_KH.repeat_interleave(layer.o_DNH.shape[1] // len(layer.v_KH), 0)
    constant_D = torch.einsum("dnh,nh->d", layer.o_DNH, v_NH)
    return constant_D if layer.o_D is None else constant_D + layer.o_D
