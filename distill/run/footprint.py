"""The cost of a stage, from the shapes of its models: trained weights, memory and arithmetic.

Memory is what one process allocates in float32 training with AdamW. Activations are counted as the inputs and
outputs of the linear layers, which is within a third of what Llama-like layers store for the backward pass.
Each of several processes that shard their models holds its part and, in addition, what is gathered at a time:
the weights around the layers during a step, the layer at work, and gradients, of which two sets exist while
they are exchanged. On a CPU the C library holds more than is allocated: memory that was given back to it, in
pieces between others that are in use.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoints.quantised.packed_checkpoint import open_checkpoint
from ...models.decoder import decoder_layers
from ...models.layered_model import LayeredModel
from ..losses.chunks import chunk_elements
from ..recipe.recipe import SHARED, Recipe, Stage
from ..stages.cached_teacher import cache_for
from ..stages.weights import TRAINABLE, is_adapter, set_trainable

_ADAMW = 8  # bytes of its two moments per trained weight
_LOGITS = 7  # tensors of a chunk's size that exist at once in float32 (losses/chunks.py)
# Memory that the C library (glibc) holds on a CPU above what is allocated, as a share of activations and
# logits, in one process. It is the peak without pages of files, less the rest and 0.43 GiB of libraries.
# For SmolLM2-135M as MLA and four windows of 256 the share was 0.47 with adapters, and 0.34 with all
# weights; for a hidden size of 256 and 32 windows 0.78, where activations may be counted too low. With
# MALLOC_MMAP_THRESHOLD_=131072, by which all is given back to the system at once, the first was 0.
_HELD = 0.5
_MATMUL = {"cpu": 1024, "cuda": 8192}  # size of the matrix product that measures a machine's rate


@dataclass(frozen=True)
class Footprint:
    """The cost of one stage in one process."""

    weights: int  # numbers in the student, without adapters
    trained: int  # numbers that the optimizer changes
    memory: dict[str, int]  # bytes by purpose
    flops: float | None  # operations per token of the data; None for experts, which are not counted


def skeleton(directory: Path) -> Any:
    """Return a checkpoint's model without its weights, on the meta device.

    Raises:
        InvalidInput: transformers cannot build it.
    """
    return LayeredModel(open_checkpoint(directory), attention=None, place=torch.device("cpu")).model


def footprint(
    recipe: Recipe,
    stage: Stage,
    student: Any,
    teacher: Any,
    bf16: bool,
    processes: int = 1,
    *,
    keeps_layers: bool = False,
) -> Footprint:
    """Return the cost of a stage, from skeletons of student and teacher, to which adapters are added.

    With `processes` above 1 the models are sharded among them; with `keeps_layers`, as under zero2, gathered
    layers stay until their backward pass.

    Raises:
        InvalidInput: the stage finds nothing to train in the student.
    """
    trainable = set_trainable(student, stage)
    trained = sum(weight.numel() for weight in trainable)
    own = [weight for name, weight in student.named_parameters() if not is_adapter(name)]
    weights = sum(weight.numel() for weight in own)
    shards = processes if stage.how == "end_to_end" else 1
    if stage.how == "stream":
        memory = _streamed_bytes(student, teacher, bf16)
    else:
        memory = {
            "weights": 4 * (weights + (trained if stage.train == "lora" else 0)) // shards,
            "gradients": 4 * trained // shards,
            "optimizer": _ADAMW * trained // shards,
            "teacher": _teacher_bytes(recipe, stage, student, teacher, bf16) // shards,
        }
    tokens = recipe.pass_windows(stage, shards) * recipe.data.seq_len
    memory["activations"] = tokens * _activation_bytes(recipe, stage, student, bf16)
    if stage.how == "end_to_end":
        device = torch.device("cuda" if _has_gpu(recipe) else "cpu")
        memory["logits"] = 4 * _LOGITS * min(chunk_elements(device), tokens * _vocabulary(student))
        if device.type == "cpu" and shards == 1:
            memory["allocator"] = int(_HELD * (memory["activations"] + memory["logits"]))
    if shards > 1:
        released = memory["activations"] + memory["logits"]
        memory["gathered"] = _gathered_bytes(recipe, stage, student, teacher, bf16, keeps_layers, released)
    has_experts = any("expert" in name for name, _ in student.named_modules())
    flops = None if has_experts else _flops(recipe, stage, student, teacher)
    return Footprint(weights, trained, memory, flops)


def matmul_rate(recipe: Recipe, bf16: bool) -> float:
    """Return the floating-point operations per second of a large matrix product here; no run is faster."""
    device = "cuda" if _has_gpu(recipe) else "cpu"
    size = _MATMUL[device]
    one = torch.ones(size, size, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((one @ one)[0, 0])  # waits for it
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _has_gpu(recipe: Recipe) -> bool:
    return recipe.device != "cpu" and torch.cuda.is_available()


def _vocabulary(model: Any) -> int:
    return len(model.get_output_embeddings().weight)


def _teacher_bytes(recipe: Recipe, stage: Stage, student: Any, teacher: Any, bf16: bool) -> int:
    size = 2 if bf16 else 4
    if recipe.teacher == SHARED:
        ours = {name: weight.shape for name, weight in student.named_parameters()}
        same = {name for name, weight in teacher.named_parameters() if ours.get(name) == weight.shape}
        shared = same - TRAINABLE[stage.train](student) - TRAINABLE["attention"](student)
        return sum(4 * weight.numel() for name, weight in teacher.named_parameters() if name not in shared)
    if cache_for(stage, recipe) is not None:
        return int(size * teacher.get_output_embeddings().weight.numel())
    return sum(size * weight.numel() for weight in teacher.parameters())


def _streamed_bytes(student: Any, teacher: Any, bf16: bool) -> dict[str, int]:
    """Return the bytes of a stage that has one layer of each model in memory, with what that layer trains.

    The embedding is in memory before the layers, with one of them where the stage begins. Where that takes
    more, it counts.
    """
    size = 2 if bf16 else 4
    trained = max(
        sum(weight.numel() for weight in layer.parameters() if weight.requires_grad)
        for layer in decoder_layers(student)
    )
    layers = {
        "weights": 4 * _largest_layer(student),
        "gradients": 4 * trained,
        "optimizer": _ADAMW * trained,
        "teacher": size * _largest_layer(teacher),
    }
    begun = [
        {**dict.fromkeys(layers, 0), name: each * _beginning(model)}
        for name, each, model in (("weights", 4, student), ("teacher", size, teacher))
    ]
    return max([layers, *begun], key=lambda memory: sum(memory.values()))


def _largest_layer(model: Any) -> int:
    return max(map(_size, decoder_layers(model)))


def _beginning(model: Any) -> int:
    """Return the numbers of a model's first layer and of all that is outside its layers, but for the head."""
    layers, head = decoder_layers(model), model.get_output_embeddings().weight
    is_tied = head is model.get_input_embeddings().weight
    return _size(model) - sum(map(_size, layers)) + _size(layers[0]) - (0 if is_tied else head.numel())


def _gathered_bytes(
    recipe: Recipe, stage: Stage, student: Any, teacher: Any, bf16: bool, keeps_layers: bool, released: int
) -> int:
    """Return the most bytes that are whole at once in a step of sharded models, in addition to `released`.

    `released` counts the bytes that are free again when the gradients of the weights around the layers are
    exchanged.
    """
    size = 2 if bf16 else 4
    layers = [_size(layer) for layer in decoder_layers(student)]
    around = size * (_size(student) - sum(layers))
    at_work = size * (sum(layers) + max(layers) if keeps_layers else 2 * max(layers)) + 4 * 2 * max(layers)
    theirs = 0
    if not cache_for(stage, recipe):
        theirs = size * (_size(teacher) - sum(map(_size, decoder_layers(teacher))))
    inside = {id(weight) for layer in decoder_layers(student) for weight in layer.parameters()}
    changed: list[nn.Parameter] = [
        weight for weight in student.parameters() if weight.requires_grad and id(weight) not in inside
    ]
    exchanged = 4 * 2 * sum(weight.numel() for weight in changed)
    return around + at_work + theirs + max(0, exchanged - released)


def _size(module: nn.Module) -> int:
    return sum((weight.numel() for weight in module.parameters()), 0)


def _activation_bytes(recipe: Recipe, stage: Stage, student: Any, bf16: bool) -> int:
    """Return the bytes per token of what a forward pass keeps for the backward pass."""
    size = 2 if bf16 else 4
    layers = [_features(layer) for layer in decoder_layers(student)]
    if stage.how != "end_to_end":
        attention = {name.rpartition(".")[0] for name in TRAINABLE["attention"](student)}
        inside = [module for name, module in student.named_modules() if name in attention]
        one = sum(map(_wide, inside)) // len(layers)
    elif recipe.gradient_checkpointing:
        one = max(layers) + len(layers) * int(student.config.get_text_config().hidden_size)
    else:
        one = sum(layers)
    return size * one


def _features(layer: nn.Module) -> int:
    """Return the numbers per token that a layer's linear modules read and give, without adapters.

    They read what their modules read, and what they give is added, which keeps nothing.
    """
    return sum(_wide(module) for name, module in layer.named_modules() if not is_adapter(name))


def _wide(module: nn.Module) -> int:
    weight = dict(module.named_parameters(recurse=False)).get(
        "weight"
    )  # an adapter's module shows its base's
    return sum(weight.shape) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else 0


def _flops(recipe: Recipe, stage: Stage, student: Any, teacher: Any) -> float:
    """Return the operations per token: two per number of a matrix, four more in its backward pass."""
    ours, theirs = _matrices(student), _matrices(teacher)
    if stage.how != "end_to_end":
        names = TRAINABLE["attention"](student)
        inside = _numbers(weight for name, weight in student.named_parameters() if name in names)
        return 2.0 * (theirs - _numbers([teacher.get_output_embeddings().weight])) + 6.0 * inside
    trained = _numbers(weight for weight in student.parameters() if weight.requires_grad)
    again = 2.0 * ours if recipe.gradient_checkpointing else 0.0
    return 4.0 * ours + 2.0 * trained + again + (0.0 if cache_for(stage, recipe) else 2.0 * theirs)


def _matrices(model: Any) -> int:
    """Return the numbers in all matrices that tokens are multiplied with: the head, but not the embedding."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return _numbers(model.parameters()) - (0 if embedding is head else _numbers([embedding]))


def _numbers(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights if weight.ndim == 2)
