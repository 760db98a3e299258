"""The lab. Its formulas against the modules and counted operations, and the command."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kvfold.lab.cli import main
from kvfold.lab.reference import MultiHeadAttention, MultiHeadLatentAttention, TokenCache, costs
from kvfold.lab.reference.trials import distances, run

from ..support.commands import run_main
from ..support.reference_modules import attention, latent_layer
from ..support.tiny import make

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
WIDTHS: dict[str, Any] = {"nope": 6, "rope": 4, "value": 5}


def mha(kv_heads: int = 4, width: int = 8) -> MultiHeadAttention:
    return MultiHeadAttention(attention(kv_heads, d_model=32, width=width, bias=False)).float()


def mla(q_rank: int | None = None, *, absorbed: bool = False) -> MultiHeadLatentAttention:
    layer = latent_layer(q_rank, d_model=32, rank=12, **WIDTHS, bias=False)
    return MultiHeadLatentAttention(layer, (1.0, 0.1), absorbed=absorbed).float()


class Experts(nn.Module):
    """Up-projections of which each latent chooses two."""

    def __init__(self, rank: int, rows: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(rank, count, bias=False)
        self.weight_EMC = nn.Parameter(torch.randn(count, rows, rank))

    def forward(self, latent_BXC: torch.Tensor) -> torch.Tensor:
        flat_ZC = latent_BXC.flatten(0, -2)
        share_ZK, chosen_ZK = self.router(flat_ZC).softmax(-1).topk(2, -1)
        rows_ZM = flat_ZC.new_zeros(len(flat_ZC), self.weight_EMC.shape[1])
        for expert, weight_MC in enumerate(self.weight_EMC):
            own, choice = (chosen_ZK == expert).nonzero(as_tuple=True)
            rows_ZM = rows_ZM.index_add(0, own, share_ZK[own, choice, None] * (flat_ZC[own] @ weight_MC.mT))
        return rows_ZM.view(*latent_BXC.shape[:-1], -1)


def mixture() -> MultiHeadLatentAttention:
    module = mla()
    module.kv_b_proj = Experts(12, 4 * (6 + 5), 3)
    return module


class LatentQueries(nn.Module):
    """Five learned latents that read an input of any length (Perceiver)."""

    def __init__(self) -> None:
        super().__init__()
        self.latent_LD = nn.Parameter(torch.randn(5, 32))
        self.projections = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, input_BXD: torch.Tensor) -> torch.Tensor:
        query, key, value, output = self.projections
        q, k, v = query(self.latent_LD)[None], key(input_BXD), value(input_BXD)
        q, k, v = (rows.unflatten(-1, (4, -1)).transpose(1, 2) for rows in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.latent_LD + output(mixed.transpose(1, 2).flatten(2))


PAIRS = {
    "mha": (mha, costs.multi_head(32, 4)),
    "gqa": (lambda: mha(2, 6), costs.multi_head(32, 4, 2, 6)),
    "mla": (mla, costs.latent(32, 4, 12, **WIDTHS)),
    "mla, query latent": (lambda: mla(9), costs.latent(32, 4, 12, 9, **WIDTHS)),
    "mla, absorbed": (lambda: mla(absorbed=True), costs.latent(32, 4, 12, absorbed=True, **WIDTHS)),
    "experts": (mixture, costs.latent(32, 4, 12, experts=3, top_k=2, **WIDTHS)),
}


def counted(module: nn.Module, *args: torch.Tensor, **options: Any) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*args, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", PAIRS)
def test_formulas_are_the_modules(name: str) -> None:
    """Parameters, cache and every matrix product of a forward of 7 tokens, and of one behind 9 others."""
    make, one = PAIRS[name]
    module = make()
    assert one.total == sum(p.numel() for p in module.parameters())
    ahead = 7 * 6 // 2  # pairs that this kernel computes and a causal one skips
    assert counted(module, torch.randn(1, 7, 32)) == one.prefill(7) + ahead * one.pair_flops
    cache = TokenCache()
    module(torch.randn(1, 9, 32), cache=cache)
    assert cache.elements == 9 * one.cache
    assert counted(module, torch.randn(1, 1, 32), cache=cache) == one.decode(9)


def test_latent_queries_are_linear_in_the_input() -> None:
    module, one = LatentQueries(), costs.latent_query(32, 4, 5)
    assert one.total == sum(p.numel() for p in module.parameters())
    for tokens in (7, 70):
        assert counted(module, torch.randn(1, tokens, 32)) == one.prefill(tokens)
    assert one.cache_bytes(10, "float32") == one.cache_bytes(10**6, "float32") == 4 * 5 * 4 * (8 + 1)


def test_distances_are_distances() -> None:
    source, other, x = mha().double(), mha().double(), torch.randn(2, 9, 32, dtype=torch.float64)

    def off() -> tuple[float, ...]:
        return tuple(distances(other, source, x).values())

    assert off() == pytest.approx((0, 0), abs=1e-12)
    with torch.no_grad():
        other.o_proj.weight.mul_(0.5)
    assert off() == pytest.approx((0.5, 0), abs=1e-12)
    with torch.no_grad():
        other.o_proj.weight.mul_(-2)
    assert off() == pytest.approx((2, 2))


def test_memory_grows_with_what_is_expanded() -> None:
    """The peak counts at least queries, keys, values and output; twice the tokens take about twice of it."""
    short, long = (run("mha", mha(), 32, tokens, "cpu") for tokens in (64, 128))
    assert short.peak_bytes >= 4 * 64 * 32 * 4
    assert 1.5 * short.peak_bytes < long.peak_bytes < 5 * short.peak_bytes
    assert short.prefill_seconds > 0
    assert short.decode_seconds > 0


class Chain(nn.Module):
    """Twenty steps, of which each needs only the last."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, cache: TokenCache | None = None) -> torch.Tensor:
        for _ in range(20):
            x = x + self.step
        return x


def test_memory_that_is_freed_does_not_count() -> None:
    assert run("chain", Chain(), 32, 64, "cpu").peak_bytes == 2 * 64 * 32 * 4


def test_model_with_norms(tmp_path: Path) -> None:
    """Its costs can be had; it cannot be measured by modules without norms."""
    model = str(make(tmp_path / "qwen3", "qwen3"))
    assert {row["name"] for row in invoke(model)["variants"]} >= {"MQA", "MLA"}
    assert "query or key norms" in run_main("lab", model, "--measure", code=2).output


def invoke(*words: str) -> Any:
    result = run_main("lab", *words, "--json")
    return json.loads(result.stdout)


def test_command_on_a_shape() -> None:
    report = invoke(
        "--d-model", "512", "--heads", "8", "--lengths", "1k", "--experts", "4", "--latents", "16"
    )
    rows = {row["name"]: row for row in report["variants"]}
    assert list(rows)[:4] == ["MHA", "GQA-4", "GQA-2", "MQA"]
    assert rows["MHA"]["parameters"]["total"] == 1_048_576
    assert rows["MHA"]["cache_bytes"] == {"1024": 1024 * 1024 * 2}
    assert rows["MLA"]["cache_share"] == (256 + 32) / 1024
    assert rows["latent queries, 16"]["cache_share"] is None
    assert rows["MLA, 4 experts"]["cache_per_token"] == rows["MLA"]["cache_per_token"]


def test_command_on_a_model() -> None:
    report = invoke(str(DEMO), "--measure", "--measure-lengths", "16", "--kv-rank", "48", "--rope-dim", "16")
    assert report["shape"]["layers"] == 6
    rows = {row["name"]: row for row in report["variants"]}
    assert rows["MHA"]["cache_per_token"] == 256
    assert rows["MHA"]["cache_bytes"]["4096"] == 6 * 256 * 4096 * 2
    off = {row["name"]: row["relative_l2"] for row in report["distances"]}
    assert off["source"] == 0
    assert off["GQA-4"] < off["GQA-2"] < off["MQA"]
    assert off["MLA"] == pytest.approx(off["MLA, absorbed"], rel=1e-3)
    assert {row["tokens"] for row in report["trials"]} == {16}


def test_tables() -> None:
    result = run_main("lab", "--d-model", "32", "--heads", "2", "--measure", "--measure-lengths", "8")
    for title in (
        "parameters of a layer",
        "KV cache, bfloat16",
        "FLOPs of decode",
        "cosine distance",
        "measured",
    ):
        assert title in result.output


def test_plot(tmp_path: Path) -> None:
    """Every variant has its line, with as many points as lengths; a file is never overwritten."""
    file, words = tmp_path / "lab.svg", ["--d-model", "32", "--heads", "2", "--lengths", "64,128,1k"]
    assert (
        CliRunner()
        .invoke(main, [*words, "--measure", "--measure-lengths", "8", "--plot", str(file)])
        .exit_code
        == 0
    )
    tree = ElementTree.parse(file)
    groups = [group.attrib.get("id", "") for group in tree.iter("{http://www.w3.org/2000/svg}g")]
    assert sum(group.startswith("axes_") for group in groups) == 4  # three of formulas, one of times
    assert "nothing is overwritten" in run_main("lab", *words, "--plot", file, code=2).output


@pytest.mark.parametrize(("words", "message"), [
    ([], "lab needs a shape or a model"),
    (["--d-model", "1024", "--heads", "46"], "give --head-dim too"),
    (["--d-model", "64", "--heads", "4", "--kv-heads", "3"], "do not divide into 3"),
    (["--d-model", "64", "--heads", "4", "--lengths", "4k,x"],
     "--lengths is 'x'; it should be a number of tokens"),
    (["--d-model", "64", "--heads", "4", "--measure", "--device", "abacus"],
     "--device abacus is not available"),
    ([str(DEMO), "--heads", "4"], "--heads would contradict the shape of MODEL"),
])  # fmt: skip
def test_mistakes(words: list[str], message: str) -> None:
    result = run_main("lab", *words, code=2)
    assert message in result.output
    assert "Traceback" not in result.output
