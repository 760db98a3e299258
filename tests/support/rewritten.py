"""The same Llama written in other ways: checkpoints with other weights that compute the same function."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SINK = 100.0  # how much larger the first token's keys are


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, float64; D hidden size, N query heads, K key heads, H head dim."""

    norm_D: Tensor
    q_NHD: Tensor
    k_KHD: Tensor
    v_KHD: Tensor
    o_DNH: Tensor

    @property
    def queries(self) -> int:
        """Query heads for each key head."""
        return len(self.q_NHD) // len(self.k_KHD)


Way = Callable[[Layer, torch.Generator], Layer]


def _scaled(layer: Layer, scale_D: Tensor) -> Layer:
    q_NHD, k_KHD, v_KHD = (rows / scale_D for rows in (layer.q_NHD, layer.k_KHD, layer.v_KHD))
    return replace(layer, norm_D=layer.norm_D * scale_D, q_NHD=q_NHD, k_KHD=k_KHD, v_KHD=v_KHD)


def channels(layer: Layer, draw: torch.Generator) -> Layer:
    """Channels of the input are a thousand times as large, or a thousandth."""
    exponent_D = torch.randint(-1, 2, layer.norm_D.shape, generator=draw)
    return _scaled(layer, 1000.0 ** exponent_D.double())


def few_channels(layer: Layer, draw: torch.Generator) -> Layer:
    """Three channels are a thousand times the others, as in large models."""
    scale_D = torch.ones_like(layer.norm_D)
    scale_D[torch.randperm(len(scale_D), generator=draw)[:3]] = 1000
    return _scaled(layer, scale_D)


def binary_channels(layer: Layer, draw: torch.Generator) -> Layer:
    """Channels are scaled by powers of two, which rounds no weight in any dtype."""
    exponent_D = torch.randint(-10, 11, layer.norm_D.shape, generator=draw)
    return _scaled(layer, 2.0 ** exponent_D.double())


def heads(layer: Layer, draw: torch.Generator) -> Layer:
    """Key heads are in another order, and so are the queries of each."""
    order = torch.randperm(len(layer.k_KHD), generator=draw)
    readers = [
        int(key) * layer.queries + int(query)
        for key in order
        for query in torch.randperm(layer.queries, generator=draw)
    ]
    return replace(
        layer,
        q_NHD=layer.q_NHD[readers],
        k_KHD=layer.k_KHD[order],
        v_KHD=layer.v_KHD[order],
        o_DNH=layer.o_DNH[:, readers],
    )


def values(layer: Layer, draw: torch.Generator) -> Layer:
    """Values are rotated within every head, and the output's projection takes it back."""
    random_KHH = torch.randn(*layer.v_KHD.shape[:2], layer.v_KHD.shape[1], generator=draw).double()
    turn_KHH = torch.linalg.qr(random_KHH)[0]
    turn_NHH = turn_KHH.repeat_interleave(layer.queries, 0)
    return replace(
        layer, v_KHD=turn_KHH @ layer.v_KHD, o_DNH=torch.einsum("dnh,ngh->dng", layer.o_DNH, turn_NHH)
    )


def phases(layer: Layer, draw: torch.Generator) -> Layer:
    """Every rotary pair of a head starts at another angle, in queries and keys alike."""
    angle_KF = 6.3 * torch.rand(len(layer.k_KHD), layer.k_KHD.shape[1] // 2, generator=draw).double()

    def turned(rows_IHD: Tensor, angle_IF: Tensor) -> Tensor:
        (real, imaginary), cos, sin = (
            rows_IHD.chunk(2, 1),
            angle_IF.cos()[..., None],
            angle_IF.sin()[..., None],
        )
        return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], 1)

    return replace(
        layer,
        k_KHD=turned(layer.k_KHD, angle_KF),
        q_NHD=turned(layer.q_NHD, angle_KF.repeat_interleave(layer.queries, 0)),
    )


WAYS: dict[str, Way] = {
    "channels": channels, "few channels": few_channels, "heads": heads, "values": values, "phases": phases,
}  # fmt: skip


def rewrite_source(source: Path, out: Path, way: Way, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Llama checkpoint of one file in another way, a function from a layer to one."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.double() for name, tensor in load_file(source / "model.safetensors").items()}
    draw, width = torch.Generator().manual_seed(3), config["head_dim"]
    for number in range(config["num_hidden_layers"]):
        stem = f"model.layers.{number}"
        names = {role: f"{stem}.self_attn.{role}_proj.weight" for role in "qkvo"}
        rows = {role: tensors[names[role]].unflatten(0, (-1, width)) for role in "qkv"}
        layer = way(
            Layer(
                norm_D=tensors[f"{stem}.input_layernorm.weight"],
                q_NHD=rows["q"],
                k_KHD=rows["k"],
                v_KHD=rows["v"],
                o_DNH=tensors[names["o"]].unflatten(1, (-1, width)),
            ),
            draw,
        )
        tensors[f"{stem}.input_layernorm.weight"] = layer.norm_D
        for role, rows_IHD in zip("qkv", (layer.q_NHD, layer.k_KHD, layer.v_KHD), strict=True):
            tensors[names[role]] = rows_IHD.flatten(0, 1)
        tensors[names["o"]] = layer.o_DNH.flatten(1)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    (out / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).partition(".")[2]}))
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    return out
