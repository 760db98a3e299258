"""Tiny multimodal checkpoints with an image in their input."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TEXT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_IMAGE = 90
_QWEN_IDS = {
    "image_token_id": _IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _ids(images: int) -> Tensor:
    text = torch.arange(12) ** 2 * 7 % 80 + 3
    return torch.cat([text[:4], torch.full((images,), _IMAGE), text[4:]])[None]


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _qwen(images: int) -> dict[str, Any]:
    kinds = (_ids(images) == _IMAGE).int()
    return {
        "input_ids": _ids(images), "pixel_values": _pixels(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": kinds,
    }  # fmt: skip


def _gemma() -> dict[str, Any]:
    return {
        "input_ids": _ids(4),
        "pixel_values": _pixels(1, 3, 8, 8),
        "token_type_ids": (_ids(4) == _IMAGE).int(),
    }


def _gemma4() -> dict[str, Any]:
    """Return an image of four by four patches, of which four make a token."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)[None]
    return {
        "input_ids": _ids(4), "pixel_values": _pixels(1, 16, 3 * 4 * 4).sigmoid(),
        "image_position_ids": places, "mm_token_type_ids": (_ids(4) == _IMAGE).int(),
    }  # fmt: skip


# model_type -> (configuration, input with an image)
TOWERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "llava": (
        {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP, "image_token_index": _IMAGE},
        lambda: {"input_ids": _ids(4), "pixel_values": _pixels(1, 3, 8, 8)},
    ),
    "mistral3": (
        {
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "head_dim": 8,
            },
            "image_token_index": _IMAGE, "spatial_merge_size": 2,
        },
        lambda: {
            "input_ids": _ids(4), "pixel_values": _pixels(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]]),
        },
    ),
    "gemma3": (
        {
            "text_config": {
                **_TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 5, "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": theta}
                    for kind, theta in (("sliding_attention", 1e3), ("full_attention", 1e4))
                },
            },
            "vision_config": {**_CLIP, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4, "image_token_index": _IMAGE, "image_token_id": _IMAGE,
            "boi_token_index": 91, "eoi_token_index": 92,
        },
        _gemma,
    ),
    "qwen2_5_vl": (
        {
            "text_config": {
                **{key: value for key, value in _TEXT.items() if key != "head_dim"}, "rope_parameters": _MROPE,
            },
            "vision_config": {**_QWEN_VISION, "window_size": 8, "fullatt_block_indexes": [1]},
            **_QWEN_IDS,
        },
        lambda: _qwen(4),
    ),
    "qwen3_vl": (
        {
            "text_config": {**_TEXT, "rope_parameters": _MROPE},
            "vision_config": {
                **_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            **_QWEN_IDS,
        },
        lambda: _qwen(4),
    ),
    "qwen3_5": (
        {
            "text_config": {
                **_TEXT,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
            },
            "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
            **_QWEN_IDS,
        },
        lambda: _qwen(4),
    ),
    "gemma4": (
        {
            "text_config": {
                **_TEXT, "model_type": "gemma4_text", "sliding_window": 9, "global_head_dim": 16,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97,
                "hidden_size_per_layer_input": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                    "full_attention": {
                        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4,
                    },
                },
            },
            "vision_config": {
                "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
            },
            "image_token_id": _IMAGE, "boi_token_id": 91, "eoi_token_id": 92, "video_token_id": 93,
            "audio_token_id": 94, "boa_token_id": 95, "eoa_token_index": 96,
        },
        _gemma4,
    ),
    "llama4": (
        {
            "text_config": {
                **_TEXT, "num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0], "attention_chunk_size": 9, "floor_scale": 8,
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 16, "patch_size": 4, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 16,
                "projector_input_dim": 16, "projector_output_dim": 16,
            },
            "image_token_index": _IMAGE, "boi_token_index": 91, "eoi_token_index": 92,
        },
        lambda: {"input_ids": _ids(4), "pixel_values": _pixels(1, 3, 16, 16)},
    ),
}  # fmt: skip


def make_multimodal(directory: Path, kind: str, *, vision: dict[str, Any] | None = None, **text: Any) -> Path:
    """Save a multimodal checkpoint with equal key/value heads; fields of `vision` and `text` replace ours."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    settings = TOWERS[kind][0]
    settings = {**settings, "text_config": {**settings["text_config"], **text}}
    settings["vision_config"] = {**settings["vision_config"], **(vision or {})}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The projection of Gemma 3 is zero in a new model.
            written = name.endswith("mm_input_projection_weight") or "attn" in name or "attention" in name
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name or "ln" in name else 0.0, 0.3)
            elif written:
                parameter.normal_(0, 0.2)
            tower = "language_model" in name
            if tower and any(f".{part}_proj." in name for part in "kv"):
                rows = parameter.unflatten(0, (-1, 8))  # wider heads are equal then too
                rows.copy_(rows[:1].clone().expand_as(rows))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"made": "by the test"}')
    return directory
