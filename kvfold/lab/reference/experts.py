"""Latent attention whose up-projections are a mixture of experts.

Legend: latent.py; E experts, M = N(P+V) rows, Z latents of a sample.
"""

from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ...convert.algebra.subspaces import low_rank
from ...core.errors import InvalidInput
from .latent_attention import MultiHeadLatentAttention

ROUNDS = 50  # of k-means at most
RIDGE = 1e-6  # of a cluster's mean energy: a cluster may have fewer tokens than the latent has dimensions


class ExpertUp(nn.Module):
    """Experts that rebuild rows from a latent c, which chooses them itself.

    The rows are Σ_e p_e(c) W_e c over the `top_k` largest p_e, with p = softmax(W_R c + b), shared out among
    those chosen. The choice depends on the cached latent alone, so nothing else is cached.

    Args:
        rank: width C of the latent.
        rows: rows M that are rebuilt.
        num_experts: experts E.
        top_k: how many of them each token uses.

    Raises:
        InvalidInput: `top_k` exceeds the number of experts.
    """

    def __init__(self, rank: int, rows: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise InvalidInput(f"top_k {top_k} does not fit {num_experts} experts; choose 1 to {num_experts}")
        self.top_k = top_k
        self.router = nn.Linear(rank, num_experts)
        self.weight_EMC = nn.Parameter(torch.randn(num_experts, rows, rank) * rank**-0.5)

    def probabilities(self, latent_BXC: Tensor) -> Tensor:
        """Return p before the choice, (B, X, E)."""
        probability_BXE: Tensor = self.router(latent_BXC).softmax(-1)
        return probability_BXE

    def shares(self, probability_BXE: Tensor) -> Tensor:
        """Return each expert's share of a token, (B, X, E): zero for those not chosen, one in all."""
        value, chosen = probability_BXE.topk(self.top_k, -1)
        return torch.zeros_like(probability_BXE).scatter(-1, chosen, value / value.sum(-1, keepdim=True))

    def forward(self, latent_BXC: Tensor) -> Tensor:
        """Rebuild rows (B, X, M); each expert is applied to its own tokens only."""
        flat_ZC = latent_BXC.flatten(0, -2)
        share_ZE = self.shares(self.probabilities(flat_ZC))
        rows_ZM = flat_ZC.new_zeros(len(flat_ZC), self.weight_EMC.shape[1])
        for expert, weight_MC in enumerate(self.weight_EMC):
            own = share_ZE[:, expert].nonzero()[:, 0]
            rows_ZM = rows_ZM.index_add(0, own, share_ZE[own, expert, None] * (flat_ZC[own] @ weight_MC.mT))
        return rows_ZM.view(*latent_BXC.shape[:-1], -1)


class ExpertLatentAttention(MultiHeadLatentAttention):
    """MLA (arXiv 2405.04434) with W_UK and W_UV as a mixture of experts (arXiv 1701.06538).

    k_s = [Σ_e p_e(c_s) W_UK,e c_s; R(s) W_KR x_s], values likewise. The choice is the read token's own, not
    the reader's: it is causal, and the cache is that of MLA.

    Args:
        d_model, num_heads, kv_lora_rank, q_lora_rank: as in MultiHeadLatentAttention.
        num_experts: experts E.
        top_k: experts that a token uses.
        options: the other arguments of MultiHeadLatentAttention.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        *,
        num_experts: int,
        top_k: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, kv_lora_rank, q_lora_rank, **options)
        self.kv_b_proj = ExpertUp(kv_lora_rank, len(self.up_weight()), num_experts, top_k)

    @property
    def experts(self) -> ExpertUp:
        """Return the experts and their router."""
        assert isinstance(self.kv_b_proj, ExpertUp)
        return self.kv_b_proj

    def latent(self, input_BTD: Tensor) -> Tensor:
        """Return the part of the cache that is not rotated, (B, T, C)."""
        latent_BTC: Tensor = self.kv_a_norm(self.kv_a_proj(input_BTD)[..., : self.kv_lora_rank])
        return latent_BTC

    def balance_loss(self, input_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
        """Return E Σ_e f_e P_e over the tokens (arXiv 2101.03961, equation 4).

        It is 1 where all experts have the same share of them. f_e is the part of the choices that fall on
        expert e, P_e the mean of p_e, through which the gradient goes.
        """
        probability_BTE = self.experts.probabilities(self.latent(input_BTD))
        kept_ZE = probability_BTE.flatten(0, 1) if valid_BT is None else probability_BTE[valid_BT.bool()]
        chosen_E = (self.experts.shares(kept_ZE) > 0).to(kept_ZE).mean(0) / self.experts.top_k
        return kept_ZE.shape[-1] * (chosen_E.detach() * kept_ZE.mean(0)).sum()

    def absorb(self) -> NoReturn:
        """Refuse to absorb: a query would need another matrix at every token that it reads.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput(
            "experts differ from token to token, so there is no single matrix to absorb; absorb() is "
            "for plain MLA"
        )

    @classmethod
    def from_latent(
        cls, source: MultiHeadLatentAttention, num_experts: int, top_k: int = 1, *, seed: int = 0
    ) -> Self:
        """Return a module equal to plain MLA.

        Every expert is a copy of its up-projection; the router is random.
        """
        made = cls._around(source, num_experts, top_k)
        experts = made.experts
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            experts.weight_EMC.copy_(source.up_weight().expand_as(experts.weight_EMC))
            drawn = torch.randn(experts.router.weight.shape, generator=random, dtype=torch.float64)
            experts.router.weight.copy_(drawn * source.kv_lora_rank**-0.5)
            experts.router.bias.zero_()
        return made

    @classmethod
    def from_clusters(
        cls,
        source: MultiHeadLatentAttention,
        rank: int,
        num_experts: int,
        input_BTD: Tensor,
        *,
        seed: int = 0,
    ) -> Self:
        """Return a smaller latent with an up-projection fitted to each cluster of tokens.

        The down-projection is the best of its rank on all tokens. k-means of the new latents gives the
        clusters, and their centres the router (p is then largest at the nearest one). Each expert is the
        least-squares solution for keys and values on its own cluster.

        Args:
            source: plain MLA, for instance a fold at full rank; its latent without a norm.
            rank: width of the new latent.
            num_experts: clusters; a token uses the nearest one.
            input_BTD: a sample of what the module reads.
            seed: of the first centres.

        Raises:
            InvalidInput: a rank that does not fit, fewer tokens than experts, or a latent with a norm.
        """
        bias = source.kv_a_proj.bias
        if source.norms or (bias is not None and bool(bias[: source.kv_lora_rank].any())):
            raise InvalidInput("the source's latent has a norm or a bias; it must be linear in the input")
        if not 1 <= rank <= source.kv_lora_rank:
            raise InvalidInput(
                f"a rank of {rank} does not fit a latent of {source.kv_lora_rank}; choose 1 to "
                f"{source.kv_lora_rank}"
            )
        sample_ZD = input_BTD.detach().flatten(0, -2).double().cpu()
        if len(sample_ZD) < num_experts:
            raise InvalidInput(
                f"{len(sample_ZD)} tokens do not make {num_experts} clusters; give more tokens"
            )
        rows_MD = _expanded_rows(source)
        unweighted = rows_MD.new_ones(len(rows_MD), 1, 1)
        small_RD, common_MR, _ = low_rank(
            rows_MD, unweighted, sample_ZD.mT @ sample_ZD / len(sample_ZD), rank
        )
        latent_ZR = sample_ZD @ small_RD.mT
        centre_ER, owner_Z = _clusters(latent_ZR, num_experts, seed)
        made = cls._around(source, num_experts, 1, rank)
        with torch.no_grad():
            made.kv_a_proj.weight[:rank].copy_(small_RD)
            made.experts.router.weight.copy_(centre_ER)
            made.experts.router.bias.copy_(-centre_ER.square().sum(-1) / 2)
            for expert in range(num_experts):
                own = owner_Z == expert
                fitted = _regressed(latent_ZR[own], sample_ZD[own] @ rows_MD.mT, common_MR)
                made.experts.weight_EMC[expert].copy_(fitted)
        return made

    @classmethod
    def _around(
        cls, source: MultiHeadLatentAttention, num_experts: int, top_k: int, rank: int | None = None
    ) -> Self:
        """Return the source with experts to be filled in, and room for a smaller latent."""
        settings = source.settings()
        if rank is not None:
            settings["kv_lora_rank"] = rank
        made = cls(**settings, num_experts=num_experts, top_k=top_k).to(source.kv_a_proj.weight)
        kept = {
            name: value
            for name, value in source.state_dict().items()
            if not name.startswith(("kv_a_proj.", "kv_b_proj."))
        }
        made.load_state_dict(kept, strict=False)
        ours, theirs = made.kv_a_proj, source.kv_a_proj
        with torch.no_grad():
            for new, old in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
                if old is not None:
                    new.copy_(torch.cat([old[: made.kv_lora_rank], old[source.kv_lora_rank :]]))
        return made


def _expanded_rows(source: MultiHeadLatentAttention) -> Tensor:
    """Return the product of a source's up- and down-projection, float64 on the CPU: rows (M, D)."""
    down_CD = source.kv_a_proj.weight[: source.kv_lora_rank].detach().double().cpu()
    up_MC = source.up_weight().detach().double().cpu()
    return up_MC @ down_CD


def _clusters(rows_ZR: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Cluster rows by k-means (Lloyd) from the rows farthest apart.

    Returns centres (count, R), and the nearest one of every row (Z,).
    """
    first = int(torch.randint(len(rows_ZR), (), generator=torch.Generator().manual_seed(seed)))
    chosen = rows_ZR[[first]]
    while len(chosen) < count:
        chosen = torch.cat([chosen, rows_ZR[[int(torch.cdist(rows_ZR, chosen).amin(1).argmax())]]])
    owner_Z = torch.cdist(rows_ZR, chosen).argmin(1)
    for _ in range(ROUNDS):
        chosen = torch.stack(
            [rows_ZR[owner_Z == n].mean(0) if (owner_Z == n).any() else chosen[n] for n in range(count)]
        )
        before, owner_Z = owner_Z, torch.cdist(rows_ZR, chosen).argmin(1)
        if torch.equal(before, owner_Z):
            break
    return chosen, owner_Z


def _regressed(latent_ZR: Tensor, rows_ZM: Tensor, common_MR: Tensor) -> Tensor:
    """Regress rows on latents, drawn to the common solution where the tokens determine nothing."""
    gram_RR = latent_ZR.mT @ latent_ZR
    ridge = RIDGE * gram_RR.diagonal().mean() + torch.finfo(gram_RR.dtype).tiny
    left_RR = gram_RR + ridge * torch.eye(len(gram_RR), dtype=gram_RR.dtype)
    fitted: Tensor = torch.linalg.solve(left_RR, latent_ZR.mT @ rows_ZM + ridge * common_MR.mT).mT
    return fitted
