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
from torch import Tensor, nn

from ...checkpoints.quantised.packed_checkpoint import open_checkpoint
from ...models.decoder import decoder_layers
from ...models.layered_model import LayeredModel
from ..losses.chunks import chunk_elements
from ..parallel.accelerator import computes_in_bf16
from ..parallel.launch import SHARDED
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


class _Sizes:
    """The numbers in the parts of a model."""

    def __init__(self, model: Any) -> None:
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        is_tied = head is embedding
        self.layers = [_count(layer.parameters()) for layer in decoder_layers(model)]
        self.around = _count(model.parameters()) - sum(self.layers)
        self.head, self.vocabulary = head.numel(), len(head)
        # Where a streamed stage begins: the first layer, and all that is outside of layers but for the head.
        self.beginning = self.around + self.layers[0] - (0 if is_tied else head.numel())
        # Matrices that tokens are multiplied with: the head, but not the embedding.
        matrices = _count(weight for weight in model.parameters() if weight.ndim == 2)
        self.matrices = matrices - (0 if is_tied else embedding.numel())


def _count(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _trained(module: nn.Module) -> int:
    return _count(weight for weight in module.parameters() if weight.requires_grad)


def skeleton(directory: Path) -> Any:
    """Return a checkpoint's model without its weights, on the meta device.

    Raises:
        InvalidInput: transformers cannot build it.
    """
    return LayeredModel(open_checkpoint(directory), attention=None, place=torch.device("cpu")).model


def footprint_of(
    recipe: Recipe, stage: Stage, student: Path, teacher: Path, processes: int | None
) -> dict[str, Any]:
    """Return the cost of a stage as plain values, with a lower bound of its seconds on this machine.

    `processes` divide the run; None: one per GPU, or one without a GPU.
    """
    if processes is None:
        processes = max(1, torch.cuda.device_count()) if recipe.device != "cpu" else 1
    bf16 = computes_in_bf16(recipe)
    shards = processes if recipe.profile in SHARDED else 1
    models = skeleton(student), skeleton(teacher)
    found = footprint(recipe, stage, *models, bf16, shards, keeps_layers=recipe.profile == "zero2")
    seconds = None
    if found.flops is not None:
        tokens = recipe.steps(stage) * recipe.step_tokens(stage)
        seconds = found.flops * tokens / _matmul_rate(recipe, bf16) / processes
    return {
        "weights": found.weights,
        "trained": found.trained,
        "processes": processes,
        "memory_bytes": {**found.memory, "total": sum(found.memory.values())},
        "flops_per_token": found.flops,
        "seconds_at_least": seconds,
    }


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
    trained = _count(set_trainable(student, stage))
    weights = _count(weight for name, weight in student.named_parameters() if not is_adapter(name))
    ours, theirs, size = _Sizes(student), _Sizes(teacher), 2 if bf16 else 4
    is_cached = cache_for(stage, recipe) is not None
    shards = processes if stage.how == "end_to_end" else 1
    if stage.how == "stream":
        memory = _streamed_bytes(ours, theirs, max(map(_trained, decoder_layers(student))), size)
    else:
        guide = size * (theirs.head if is_cached else theirs.around + sum(theirs.layers))
        if recipe.teacher == SHARED:
            shapes = {name: weight.shape for name, weight in student.named_parameters()}
            same = {name for name, weight in teacher.named_parameters() if shapes.get(name) == weight.shape}
            shared = same - TRAINABLE[stage.train](student) - TRAINABLE["attention"](student)
            guide = 4 * _count(weight for name, weight in teacher.named_parameters() if name not in shared)
        memory = {
            "weights": 4 * (weights + (trained if stage.train == "lora" else 0)) // shards,
            "gradients": 4 * trained // shards,
            "optimizer": _ADAMW * trained // shards,
            "teacher": guide // shards,
        }
    tokens = recipe.pass_windows(stage, shards) * recipe.data.seq_len
    memory["activations"] = tokens * size * _activations(recipe, stage, student)
    if stage.how == "end_to_end":
        device = torch.device("cuda" if _has_gpu(recipe) else "cpu")
        memory["logits"] = 4 * _LOGITS * min(chunk_elements(device), tokens * ours.vocabulary)
        if device.type == "cpu" and shards == 1:
            memory["allocator"] = int(_HELD * (memory["activations"] + memory["logits"]))
    if shards > 1:
        largest = max(ours.layers)
        at_work = size * (sum(ours.layers) + largest if keeps_layers else 2 * largest) + 4 * 2 * largest
        outside = trained - sum(map(_trained, decoder_layers(student)))
        # Activations and logits are free again when the gradients around the layers are exchanged.
        exchanged = max(0, 4 * 2 * outside - memory["activations"] - memory["logits"])
        around = size * (ours.around + (0 if is_cached else theirs.around))
        memory["gathered"] = around + at_work + exchanged
    flops = None
    if not any("expert" in name for name, _ in student.named_modules()):
        # Two per number of a matrix, four more in its backward pass.
        if stage.how != "end_to_end":
            names = TRAINABLE["attention"](student)
            inside = (weight for name, weight in student.named_parameters() if name in names)
            matrices = _count(weight for weight in inside if weight.ndim == 2)
            flops = 2.0 * (theirs.matrices - theirs.head) + 6.0 * matrices
        else:
            changed = (weight for weight in student.parameters() if weight.requires_grad)
            flops = 4.0 * ours.matrices + 2.0 * _count(weight for weight in changed if weight.ndim == 2)
            flops += 2.0 * ours.matrices if recipe.gradient_checkpointing else 0.0
            flops += 0.0 if is_cached else 2.0 * theirs.matrices
    return Footprint(weights, trained, memory, flops)


def _matmul_rate(recipe: Recipe, bf16: bool) -> float:
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


def _streamed_bytes(ours: _Sizes, theirs: _Sizes, trained: int, size: int) -> dict[str, int]:
    """Return the bytes of a stage that has one layer of each model in memory, with what that layer trains.

    The embedding is in memory before the layers, with one of them where the stage begins. Where that takes
    more, it counts.
    """
    layers = {
        "weights": 4 * max(ours.layers),
        "gradients": 4 * trained,
        "optimizer": _ADAMW * trained,
        "teacher": size * max(theirs.layers),
    }
    nothing = dict.fromkeys(layers, 0)
    begun = [{**nothing, "weights": 4 * ours.beginning}, {**nothing, "teacher": size * theirs.beginning}]
    return max([layers, *begun], key=lambda memory: sum(memory.values()))


def _activations(recipe: Recipe, stage: Stage, student: Any) -> int:
    """Return the numbers per token that a forward pass keeps for the backward pass."""
    # Adapters read what their modules read, and what they give is added, which keeps nothing.
    layers = [
        sum(_wide(module) for name, module in layer.named_modules() if not is_adapter(name))
        for layer in decoder_layers(student)
    ]
    if stage.how != "end_to_end":
        attention = {name.rpartition(".")[0] for name in TRAINABLE["attention"](student)}
        inside = (module for name, module in student.named_modules() if name in attention)
        return sum(map(_wide, inside)) // len(layers)
    if recipe.gradient_checkpointing:
        return max(layers) + len(layers) * int(student.config.get_text_config().hidden_size)
    return sum(layers)


def _wide(module: nn.Module) -> int:
    """Return the numbers per token that a linear module reads and gives."""
    own = dict(module.named_parameters(recurse=False))  # an adapter's module shows its base's weight
    weight = own.get("weight")
    return sum(weight.shape) if weight is not None and weight.ndim == 2 else 0
