"""`kvfold lab`.

Costs of attention variants at a shape or at a model's, computed and, on request, measured.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
from pydantic import BeforeValidator, Field

from ..core.command_options import Option, read_options, takes
from ..core.console import Command, show_json, show_table
from ..core.errors import InvalidInput
from ..core.files import whole_file
from ..core.option_types import Place, Tokens, as_list
from ..core.settings import Settings
from ..core.units import show_context

if TYPE_CHECKING:
    from ..convert.algebra.attention import Attention
    from ..convert.families.source import Source

# DeepSeek-V2's choice: a latent of four heads, a rotary key of half a head (arXiv 2405.04434, section
# 2.1.4).
RANK_HEADS, ROPE_HEADS = 4, 0.5
TOKENS = 256  # of the random input on which outputs are compared


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A source's attention shape, and the widths of MLA to compare it with."""

    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_rank: int
    q_rank: int | None
    nope: int
    rope: int
    value: int
    layers: int = 1


_Width = Annotated[int, Field(ge=1)]
_Lengths = Annotated[tuple[Tokens, ...], BeforeValidator(as_list), Option("", "TOKENS,...", show_context)]


class LabRequest(Settings):
    """The request of `kvfold lab`, whose fields are its options."""

    model: str | None = None
    """A directory or a Hub id."""
    d_model: _Width | None = None
    """Hidden size, where no MODEL is given."""
    heads: _Width | None = None
    """Query heads, where no MODEL is given."""
    kv_heads: _Width | None = None
    """Key/value heads of the source. Default: as many as heads."""
    head_dim: _Width | None = None
    """Width of a head. Default: d-model / heads."""
    kv_rank: _Width | None = None
    """Width of MLA's latent. Default: 4 heads."""
    q_rank: _Width | None = None
    """Width of its queries' latent. Default: none."""
    nope_dim: _Width | None = None
    """Un-rotated width of its heads. Default: a head."""
    rope_dim: Annotated[int, Field(ge=0)] | None = None
    """Width of its rotary key; 0: none. Default: half a head."""
    v_dim: _Width | None = None
    """Width of its values. Default: a head."""
    experts: Annotated[int, Field(ge=2)] | None = None
    """Also MLA with so many experts, two per token."""
    latents: _Width | None = None
    """Also so many latent queries that read all tokens (Perceiver)."""
    lengths: _Lengths = (4096, 32768, 131072)
    """Tokens for cache and FLOPs."""
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] = "bfloat16"
    """Number format of the cache."""
    measure: bool = False
    """Also run them: time, memory, and how far folds are from the source."""
    measure_lengths: _Lengths = (128, 512)
    """Tokens for `measure`."""
    devices: Annotated[tuple[str, ...], Option("--device", repeated=True)] = ("cpu",)
    """For `measure`; may be repeated."""
    plot: Place | None = None
    """Also draw cache, FLOPs and times to an SVG (matplotlib)."""


@click.command("lab", cls=Command)
@click.argument("model", required=False)
@takes(LabRequest, without=("model",))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(as_json: bool, **options: Any) -> None:
    """Compare attention variants: parameters, cache and FLOPs of MHA, GQA, MQA and MLA at a shape.

    The shape is that of MODEL, a directory or a Hub id, or of the options. Widths are those of one layer; the
    cache of MODEL is that of all its layers. --measure runs its first layer, or one with random weights, and
    folds of it, whose heads keep their width.
    """
    asked = read_options(LabRequest, options)
    plot, counts = asked.plot, asked.lengths
    if plot is not None and plot.exists():
        raise InvalidInput(f"{plot} exists, and nothing is overwritten; name another file with --plot")
    if plot is not None and find_spec("matplotlib") is None:
        raise InvalidInput("--plot needs matplotlib, which is not installed; pip install 'kvfold[report]'")
    shape, source = _shape(asked)
    report: dict[str, Any] = {
        "shape": asdict(shape),
        "dtype": asked.dtype,
        "variants": _variants(shape, asked),
    }
    if asked.measure:
        report.update(_measured(shape, source, asked.measure_lengths, asked.devices))
    if plot is not None:
        _draw(report, counts, plot)
    if as_json:
        show_json(report)
        return
    _show_costs(report, counts)
    if asked.measure:
        _show_measured(report)


def _shape(asked: LabRequest) -> tuple[Shape, "Source | None"]:
    """Return the shape asked for, and the model that it is of, where there is one."""
    source, layers = None, 1
    if asked.model is None:
        d_model, heads = asked.d_model, asked.heads
        if d_model is None or heads is None:
            raise InvalidInput("lab needs a shape or a model; write --d-model 512 --heads 8, or name a MODEL")
        kv_heads = asked.kv_heads or heads
        width = asked.head_dim
        if width is None and d_model % heads:
            raise InvalidInput(f"--d-model {d_model} does not divide into {heads} heads; give --head-dim too")
        width = width or d_model // heads
    else:
        given = [
            f"--{name.replace('_', '-')}"
            for name in ("d_model", "heads", "kv_heads", "head_dim")
            if getattr(asked, name)
        ]
        if given:
            raise InvalidInput(
                f"{' and '.join(given)} would contradict the shape of MODEL; leave out one of the two"
            )
        from ..convert.families.source import open_source
        from ..core.hub import resolve

        source = open_source(resolve(asked.model))
        layers, found = source.layers, source.geometry
        d_model, width = found.hidden_size, found.head_dim
        heads, kv_heads = found.num_attention_heads, found.num_key_value_heads
    if heads % kv_heads:
        raise InvalidInput(f"{heads} heads do not divide into {kv_heads} key/value heads; choose a divisor")
    return Shape(
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        kv_rank=asked.kv_rank or RANK_HEADS * width,
        q_rank=asked.q_rank,
        nope=asked.nope_dim or width,
        rope=max(2, int(width * ROPE_HEADS) // 2 * 2) if asked.rope_dim is None else asked.rope_dim,
        value=asked.v_dim or width,
        layers=layers,
    ), source


def _variants(shape: Shape, asked: LabRequest) -> list[dict[str, Any]]:
    from .reference import costs

    def latent(**form: Any) -> costs.Costs:
        sizes = shape.d_model, shape.heads, shape.kv_rank, shape.q_rank
        return costs.latent(*sizes, nope=shape.nope, rope=shape.rope, value=shape.value, **form)

    rows = costs.variants(shape.d_model, shape.heads, shape.kv_heads, shape.head_dim)
    rows += [latent(), latent(absorbed=True)]
    if asked.experts:
        rows.append(latent(experts=asked.experts, top_k=2))
    if asked.latents:
        rows.append(costs.latent_query(shape.d_model, shape.heads, asked.latents))
    return [
        {
            "name": one.name,
            "parameters": {**one.parameters, "total": one.total},
            "cache_per_token": one.cache,
            "cache_formula": one.cache_formula,
            "cache_share": None if one.fixed_cache else one.cache / rows[0].cache,
            "cache_per_sequence": one.fixed_cache,
            "cache_bytes": {str(n): shape.layers * one.cache_bytes(n, asked.dtype) for n in asked.lengths},
            "prefill_flops": {str(n): one.prefill(n) for n in asked.lengths},
            "prefill_formula": one.prefill_formula,
            "decode_flops": {str(n): one.decode(n) for n in asked.lengths},
            "decode_formula": one.decode_formula,
            "order": dict(zip(("prefill", "decode", "cache"), one.order, strict=True)),
        }
        for one in rows
    ]


def _layer(shape: Shape, source: "Source | None") -> "tuple[Attention, tuple[float, ...]]":
    """Return the first layer of a model, or one with random weights, and radians per token of its pairs."""
    import torch
    from torch import nn

    from ..convert.algebra.attention import Attention

    if source is not None:
        table_F, factor = source.frequencies()
        return source.attention(0, factor).to(torch.float32), tuple(table_F.tolist())
    width = shape.head_dim
    if width % 2:
        raise InvalidInput(f"heads of width {width} have no rotary pairs; the width must be even")
    q_NHD, k_KHD, v_KHD = (
        nn.Linear(shape.d_model, heads * width, bias=False).weight.detach().unflatten(0, (heads, width))
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    output = nn.Linear(shape.heads * width, shape.d_model, bias=False).weight.detach()
    o_DNH = output.unflatten(1, (shape.heads, width))
    table = tuple(10000.0 ** (-pair / width) for pair in range(0, width, 2)) if shape.rope else ()
    return Attention(q_NHD=q_NHD, k_KHD=k_KHD, v_KHD=v_KHD, o_DNH=o_DNH, scale=width**-0.5), table


def _measured(
    shape: Shape, source: "Source | None", counts: Sequence[int], devices: tuple[str, ...]
) -> dict[str, list[dict[str, Any]]]:
    """Return times and memory of the source and its folds, and their outputs' distances from it."""
    import torch

    from ..convert.algebra.target import LatentTarget
    from .reference.folding import fold_to_groups, fold_to_latent
    from .reference.modules import MultiHeadAttention, MultiHeadLatentAttention
    from .reference.trials import distances, run

    for device in devices:
        if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
            raise InvalidInput(
                f"--device {device} is not available here; use cpu, or cuda where torch has a GPU"
            )
    torch.manual_seed(0)
    layer, table = _layer(shape, source)
    sample_BTD, input_BTD = (
        torch.randn(2, TOKENS, shape.d_model, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    modules: dict[str, Any] = {"source": MultiHeadAttention(layer, table)}
    for groups in (n for n in range(shape.kv_heads - 1, 0, -1) if shape.kv_heads % n == 0):
        pooled = fold_to_groups(layer, table, groups, sample_BTD)
        modules["MQA" if groups == 1 else f"GQA-{groups}"] = MultiHeadAttention(pooled, table)
    if bool(shape.rope) == bool(table):
        target = LatentTarget(kv_lora_rank=shape.kv_rank, qk_rope_head_dim=shape.rope)
        latent, slots = fold_to_latent(layer, table, target, sample_BTD)
        modules["MLA"] = MultiHeadLatentAttention(latent, slots)
        modules["MLA, absorbed"] = MultiHeadLatentAttention(latent, slots, absorbed=True)
    away = [
        {"name": name, **distances(module, modules["source"], input_BTD)} for name, module in modules.items()
    ]
    trials = [
        asdict(run(name, module, shape.d_model, n, device))
        for device in devices
        for n in counts
        for name, module in modules.items()
    ]
    return {"distances": away, "trials": trials}


def _show_costs(report: dict[str, Any], counts: Sequence[int]) -> None:
    rows = report["variants"]
    matrices = list(dict.fromkeys(name for row in rows for name in row["parameters"] if name != "total"))
    cells = []
    for row in rows:
        sizes = [row["parameters"].get(name) for name in (*matrices, "total")]
        cells.append([row["name"], *("" if size is None else f"{size:,}" for size in sizes)])
    show_table("parameters of a layer", ("", *matrices, "total"), cells)
    lengths = [f"{n} tokens" for n in counts]
    cells = []
    for row in rows:
        cached = f"{row['cache_per_sequence']:,} in all"
        if row["cache_share"] is not None:
            cached = f"{row['cache_per_token']:,} ({row['cache_share']:.1%})"
        sizes = [_bytes(row["cache_bytes"][str(n)]) for n in counts]
        cells.append([row["name"], row["cache_formula"], cached, *sizes])
    show_table(f"KV cache, {report['dtype']}", ("", "", "elements per token", *lengths), cells)
    for kind in ("prefill", "decode"):
        cells = []
        for row in rows:
            flops = [f"{row[f'{kind}_flops'][str(n)]:.3g}" for n in counts]
            cells.append([row["name"], *flops, row["order"][kind], row[f"{kind}_formula"]])
        show_table(f"FLOPs of {kind}, a layer", ("", *lengths, "O(.)", "formula"), cells)


def _show_measured(report: dict[str, Any]) -> None:
    cells = [
        [d["name"], f"{d['relative_l2']:.3g}", f"{d['cosine_distance']:.3g}"] for d in report["distances"]
    ]
    show_table(
        "outputs against the source's on random input, before any training",
        ("", "relative L2", "cosine distance"),
        cells,
    )
    cells = []
    for t in report["trials"]:
        times = [f"{1e3 * t[kind]:.2f}" for kind in ("prefill_seconds", "decode_seconds")]
        cells.append([t["name"], t["device"], str(t["tokens"]), *times, _bytes(t["peak_bytes"])])
    show_table("measured, float32", ("", "", "tokens", "prefill, ms", "one more, ms", "peak memory"), cells)


def _draw(report: dict[str, Any], counts: Sequence[int], file: Path) -> None:
    """Draw cache, FLOPs and times over the lengths, side by side; a variant has one colour in all of them."""
    from matplotlib.figure import Figure

    variants = report["variants"]
    kinds = {
        "cache_bytes": "KV cache, bytes",
        "prefill_flops": "prefill, FLOPs",
        "decode_flops": "FLOPs per decoded token",
    }
    panels = {
        title: {row["name"]: [(n, row[kind][str(n)]) for n in counts] for row in variants}
        for kind, title in kinds.items()
    }
    for trial in report.get("trials", ()):
        name = variants[0]["name"] if trial["name"] == "source" else trial["name"]
        lines = panels.setdefault(f"prefill on {trial['device']}, seconds", {})
        lines.setdefault(name, []).append((trial["tokens"], trial["prefill_seconds"]))
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    drawn: dict[str, Any] = {}
    figure = Figure(figsize=(4.5 * len(panels), 5), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, points in lines.items():
            look = {"marker": "o", "color": f"C{names.index(name) % 10}"}
            (drawn[name],) = axes.plot(*zip(*sorted(points), strict=True), **look)
        axes.set(title=title, xlabel="tokens", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=4)
    with whole_file(file) as temporary:
        figure.savefig(temporary, format="svg")


def _bytes(value: int) -> str:
    return f"{value / 1e6:,.2f} MB"
