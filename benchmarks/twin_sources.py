"""Twins of a small Llama checkpoint in other families: `train(DIRECTORY, KIND, MODEL, TEXT)`.

A twin begins with the checkpoint's weights. Norms that the checkpoint lacks begin with the root mean square
of what they normalise, so that the twin computes nearly what the checkpoint does. Every twin is then trained
on the same text, the Llama twin too, so that their losses can be compared. The same seed and one thread make
the same weights. Legend: B windows, S tokens, C channels of a norm.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.core.console import progress
from kvfold.core.errors import InvalidInput
from kvfold.core.files import whole_directory
from kvfold.models.causal_lm import load_tokenizer

KINDS = ("llama", "qwen3", "olmo2")
STEPS = 220  # of AdamW
_WINDOWS = 16  # B
_POSITIONS = 256  # S
_RATE = 1e-3
_WARMUP = 30  # steps
_MEASURED = 8  # windows by which norms begin
# Of Llama's configuration, what the other families' do not have, or have as their own.
_NOT_SHARED = {"model_type", "architectures", "transformers_version", "pretraining_tp", "mlp_bias"}


class Batches:
    """Windows of a text, drawn by a seed of their own.

    Args:
        ids_T: the tokens of the text.
        first: the token that every window begins with.
        seed: of the draw.
    """

    def __init__(self, ids_T: Tensor, first: int, seed: int) -> None:
        self._ids_T, self._first = ids_T, first
        self._draw = torch.Generator().manual_seed(seed)

    def draw(self, windows: int) -> Tensor:
        """Return windows, int64 (B, S)."""
        starts_B = torch.randint(0, len(self._ids_T) - _POSITIONS, (windows,), generator=self._draw)
        rows = torch.stack([self._ids_T[start : start + _POSITIONS - 1] for start in starts_B])
        return torch.cat([torch.full((windows, 1), self._first), rows], 1)


def read_llama(model: Path) -> Any:
    """Return the checkpoint, float32.

    Raises:
        InvalidInput: it is not of Llama, has biases, fewer positions than a window, or no first token.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    plain = config.model_type == "llama" and not config.attention_bias and not config.mlp_bias
    if not plain or config.max_position_embeddings < _POSITIONS:
        raise InvalidInput(
            f"{model} has no twins: they are made of a Llama checkpoint without biases and with at least "
            f"{_POSITIONS} positions"
        )
    if not isinstance(config.bos_token_id, int):
        raise InvalidInput(
            f"{model / 'config.json'} has the bos_token_id {config.bos_token_id}; every window that twins "
            "are trained on begins with that token, so it must be a number"
        )
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def new_twin(kind: str, llama: Any, ids_BS: Tensor) -> Any:
    """Return a twin before its training.

    Args:
        kind: of `KINDS`.
        llama: the checkpoint. The Llama twin is this model itself.
        ids_BS: tokens by which new norms begin.
    """
    from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if kind == "llama":
        return llama
    shared = {key: value for key, value in llama.config.to_dict().items() if key not in _NOT_SHARED}
    model: Any = (
        Qwen3ForCausalLM(Qwen3Config(**shared))
        if kind == "qwen3"
        else Olmo2ForCausalLM(Olmo2Config(**shared))
    )
    state, size = dict(llama.state_dict()), root_mean_squares(llama, ids_BS)
    for number in range(llama.config.num_hidden_layers):
        layer = f"model.layers.{number}"
        for name in "qk":
            channels = f"{layer}.self_attn.{name}_norm.weight"
            state[channels] = (
                torch.ones_like(model.state_dict()[channels]) * size[f"{layer}.self_attn.{name}_proj"]
            )
        if kind == "olmo2":
            _move_norms(state, size, layer)
    model.load_state_dict(state)
    model.tie_weights()
    return model


def _move_norms(state: dict[str, Tensor], size: dict[str, Tensor], layer: str) -> None:
    """Move the norms of a layer from inputs to outputs, and the weights that they had into projections."""
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    for norm, projections in (
        ("input_layernorm", [f"{attention}.{name}_proj" for name in "qkv"]),
        ("post_attention_layernorm", [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
    ):
        weight_C = state.pop(f"{layer}.{norm}.weight")
        for projection in projections:
            rows = state[f"{projection}.weight"]
            state[f"{projection}.weight"] = rows * weight_C / size[f"{layer}.{norm} input"]
    state[f"{layer}.post_attention_layernorm.weight"] = (
        torch.ones_like(weight_C) * size[f"{attention}.o_proj"]
    )
    state[f"{layer}.post_feedforward_layernorm.weight"] = torch.ones_like(weight_C) * size[f"{mlp}.down_proj"]


def root_mean_squares(model: Any, ids_BS: Tensor) -> dict[str, Tensor]:
    """Return the size of each projection's output by the projection's name, and of each norm's input."""
    found: dict[str, Tensor] = {}

    def size(activations: Tensor) -> Tensor:
        return activations.square().mean().sqrt()

    def watch(name: str) -> Any:
        def keep(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name], found[f"{name} input"] = size(output), size(inputs[0])

        return keep

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if name.endswith(("_proj", "layernorm"))
    ]
    with torch.no_grad():
        model(ids_BS)
    for hook in hooks:
        hook.remove()
    return found


def steps(model: Any, batches: Batches, count: int) -> Iterator[float]:
    """Train, and yield the loss of each step, nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(count):
        rate = _RATE * min(1, (step + 1) / _WARMUP) * (0.5 * (1 + math.cos(math.pi * step / count)))
        optimizer.param_groups[0]["lr"] = rate
        ids_BS = batches.draw(_WINDOWS)
        loss = model(ids_BS, labels=ids_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def train(directory: Path, kind: str, model: Path, text: str, count: int = STEPS) -> None:
    """Train a twin on a text and write it; the directory appears when it is whole.

    Args:
        directory: that does not exist yet.
        kind: of `KINDS`.
        model: the directory of the Llama checkpoint.
        text: of the training.
        count: steps of the training.

    Raises:
        InvalidInput: there are no twins of the checkpoint, or the text is shorter than a window.
    """
    torch.manual_seed(0)
    tokenizer, llama = load_tokenizer(model), read_llama(model)
    ids_T = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if len(ids_T) <= _POSITIONS:
        raise InvalidInput(f"the training text has {len(ids_T)} tokens; a window alone has {_POSITIONS}")
    first = llama.config.bos_token_id
    twin = new_twin(kind, llama, Batches(ids_T, first, seed=2).draw(_MEASURED))
    # A draw of its own: all twins are trained on the same windows.
    for _ in progress(steps(twin, Batches(ids_T, first, seed=1), count), f"Training the twin {kind}", count):
        pass
    with whole_directory(directory) as partial:
        twin.eval().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
