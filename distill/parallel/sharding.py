"""A model that all processes run together: a copy in each (DDP), or a shard of each layer (FSDP2).

The weights of a sharded model are DTensors. They can be read from its checkpoint while it is sharded
(layer_units.py).

Shapes: any.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...core.console import progress
from ...models.decoder import decoder_layers
from .accelerator import is_sharded
from .layer_units import LayerUnits


def distribute(
    accelerator: Accelerator, module: nn.Module, model: Any, units: LayerUnits | None = None
) -> nn.Module:
    """Return a module that all processes run together, from one whose forward runs `model`.

    With sharding, each decoder layer is a unit, and the model's weights become shards in place. Everything
    else is one more unit, which the module's own forward gathers: the head is whole there, and only there.
    Gradients are averaged over the processes with and without sharding. `units` is the source of the weights,
    if the model has none yet.

    Raises:
        InvalidInput: a weight is NaN or infinite.
    """
    if not is_sharded():
        return cast(nn.Module, accelerator.prepare(module))
    precision = MixedPrecisionPolicy()
    if accelerator.mixed_precision == "bf16":
        # Gradients are added up in float32, and the loss is float32.
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _shard_layers(model, precision, units, "student")
    with units.rest() if units else nullcontext():
        return cast(nn.Module, fully_shard(module, mp_policy=precision, **_settings()))


def shard_teacher(teacher: Any, units: LayerUnits | None = None) -> None:
    """Shard a teacher's model in place where the student is sharded, unless it has none or is sharded.

    Its units are its layers, everything around them, and a head that is not the embedding. The model is
    called through its base model, which is the root. The head is gathered where it is read. `units` is the
    source of the weights, if the model has none yet.

    Raises:
        InvalidInput: a weight is NaN or infinite.
    """
    model = getattr(teacher, "model", None)
    if not is_sharded() or model is None or isinstance(model.base_model, FSDPModule):
        return
    precision = MixedPrecisionPolicy()  # computes in the dtype of its weights
    _shard_layers(model, precision, units, "teacher")
    with units.rest() if units else nullcontext():
        fully_shard(model.base_model, mp_policy=precision, **_settings())
        head = model.get_output_embeddings()
        if not isinstance(head.weight, DTensor):
            fully_shard(head, mp_policy=precision, **_settings())


def _shard_layers(model: Any, precision: MixedPrecisionPolicy, units: LayerUnits | None, role: str) -> None:
    reshards = FullyShardedDataParallelPlugin().reshard_after_forward
    layers = decoder_layers(model)
    shown = progress(layers, f"{role}'s layers", len(layers)) if units else layers
    for number, layer in enumerate(shown):
        with units.layer(number) if units else nullcontext():
            fully_shard(layer, reshard_after_forward=reshards, mp_policy=precision, **_settings())


def _settings() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    return {"offload_policy": FullyShardedDataParallelPlugin().cpu_offload}


@torch.no_grad()
def call_inside(module: nn.Module, function: Callable[[], Any]) -> None:
    """Call a function in the place of a module's forward, where everything around the layers is gathered too.

    All processes must call it together. The function may run the model, uncompiled.
    """
    # FSDP 2 of torch 2.11 fails on a GPU without arguments: it looks for those that it moved there.
    module.forward = lambda _: function()
    try:
        with torch.compiler.set_stance("force_eager"):
            module(None)
    finally:
        del module.forward
    reshard(module)


def reshard(module: nn.Module) -> None:
    """Reshard parameters after a forward pass that has no backward pass."""
    for unit in module.modules():  # with layers that stay gathered after their forward, those too
        if isinstance(unit, FSDPModule):
            unit.reshard()


def without_sync(accelerator: Accelerator, module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which gradients are added up locally and not exchanged.

    It is for every micro-batch of a step but the last. It has no effect on shards, where a gradient that is
    not exchanged would be held whole.
    """
    return nullcontext() if is_sharded() else accelerator.no_sync(module)
