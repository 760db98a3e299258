"""Checkpoints as older releases of transformers saved them: with the buffers of their classes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvfold.checkpoints.shards import INDEX


def _causal(kind: torch.dtype, place: str) -> dict[str, Tensor]:
    """Return a causal mask, and the number for what it hides, which is -inf in float16."""
    mask = torch.ones(64, 64).tril().to(kind)[None, None]
    return {f"{place}.bias": mask, f"{place}.masked_bias": torch.tensor(-1e9).to(torch.float16)}


# What a file has of each of two layers, and beside them; `{}` stands for the layer's number.
IN_LAYERS: dict[str, dict[str, Tensor]] = {
    "gpt_neox": {**_causal(torch.uint8, "gpt_neox.layers.{}.attention"),
                 "gpt_neox.layers.{}.attention.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float16)},
    "gptj": _causal(torch.bool, "transformer.h.{}.attn"),
    "gpt2": _causal(torch.float32, "transformer.h.{}.attn"),
    "llama": {"model.layers.{}.self_attn.rotary_emb.inv_freq": torch.full((4,), torch.nan)},
    "falcon": {"transformer.h.{}.self_attention.maybe_rotary.inv_freq": torch.ones(2)},
    "opt": {},
    "stablelm": {"model.layers.{}.self_attn.rotary_emb.cos_cached": torch.ones(64, 2),
                 "model.layers.{}.self_attn.rotary_emb.sin_cached": torch.ones(64, 2)},
}  # fmt: skip
BESIDE: dict[str, dict[str, Tensor]] = {
    "llama": {"model.embed_tokens.version": torch.tensor([3]), "model.position_ids": torch.arange(64)[None]},
    "opt": {"model.decoder.version": torch.tensor([torch.inf])},
}


def add_old_buffers(directory: Path, family: str) -> set[str]:
    """Add a family's old buffers to a checkpoint of two layers; return their names."""
    found = {
        name.format(layer): tensor.clone() for layer in range(2) for name, tensor in IN_LAYERS[family].items()
    }
    found |= BESIDE.get(family, {})
    file, index = sorted(directory.glob("*.safetensors"))[0], directory / INDEX
    save_file(load_file(file) | found, file, {"format": "pt"})
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(found, file.name)
        index.write_text(json.dumps(content))
    return set(found)
