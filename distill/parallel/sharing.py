"""How the processes of a run share a model: every one has a copy (DDP), or a shard of each layer (FSDP2).

A sharded model's weights are DTensors, read from its checkpoint while it is sharded, see units.py. Whole
tensors are what is saved, so that a run goes on with any number of processes.

Shapes: any.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from ...core.errors import InvalidInput
from ...models.decoder import decoder_layers
from ..losses import LOSSES
from ..recipe.recipe import Recipe, Stage
from ..watch.display import progress_bar
from ..watch.trackers import check_trackers, directory_of

if TYPE_CHECKING:
    from .units import Units

_M_MMAP_THRESHOLD = (
    -3
)  # of glibc's malloc.h: blocks of so many bytes are mapped, and unmapped when they are freed


def is_sharded() -> bool:
    """Whether the launcher asked for FSDP.

    accelerate's own answer is for GPUs only; its launcher says it through the environment, which holds on a
    CPU as well.
    """
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The processes, devices and precision of a run.

    Raises:
        InvalidInput: the launcher asks for what kvfold does not do, a tracker is not installed, or a step's
        windows do not
            divide among the processes.
    """
    has_bf16 = recipe.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    bf16 = recipe.precision == "bf16" or (recipe.precision == "auto" and has_bf16)
    # All wait while one tokenises and writes, which may take far longer than the usual limit of ten minutes.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))
    check_launcher()
    check_trackers(recipe.trackers)
    # Losses of layers alone leave weights behind the last layer without a gradient.
    unused = any(
        stage.how == "end_to_end" and all(LOSSES[name].reads != "logits" for name in stage.learnt)
        for stage in recipe.stages
    )
    # What is exchanged between copies is the gradients themselves, not a second set of them.
    copies = DistributedDataParallelKwargs(find_unused_parameters=unused, gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=recipe.device == "cpu",
        mixed_precision="bf16" if bf16 else "no",
        kwargs_handlers=[patience, copies],
        log_with=list(recipe.trackers) or None,
        project_dir=directory_of(recipe),
    )
    # A launcher's configuration may set it, and accelerate would divide the loss by it; the loop divides by
    # tokens.
    accelerator.gradient_accumulation_steps = 1
    if is_sharded() and accelerator.device.type == "cpu":
        _free_at_once()
    processes = accelerator.num_processes
    for stage in recipe.stages:
        windows = recipe.step_windows(stage)
        if windows % processes:
            enough = math.ceil(windows / processes) * processes * recipe.data.seq_len
            raise InvalidInput(
                f"batch_tokens {stage.batch_tokens} of stage {stage.name} is {windows} windows, which do "
                f"not divide among "
                f"{processes} processes; {enough} would"
            )
    return accelerator


def _free_at_once() -> None:
    """Have the C library hand freed layers back to the system: glibc would keep what is gathered and let go
    of, layer after layer, which adds up to several times the model."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 18)


def shards_models(stage: Stage) -> bool:
    """Whether a stage's models are sharded; aligning layers needs whole ones."""
    return is_sharded() and stage.how == "end_to_end"


def first_place(accelerator: Accelerator, stage: Stage) -> torch.device:
    """Where to load a stage's models whole: what will be sharded goes to the GPU a unit at a time."""
    return torch.device("cpu") if shards_models(stage) else cast(torch.device, accelerator.device)


def check_launcher() -> None:
    """Refuse what a launcher's configuration may ask for and kvfold does not do.

    Raises:
        InvalidInput: FSDP 1, DeepSpeed or Megatron.
    """
    if is_sharded() and os.environ.get("FSDP_VERSION", "1") != "2":
        raise InvalidInput(
            "the launcher asks for FSDP 1; kvfold shards with FSDP 2: set fsdp_version: 2 or use "
            "--profile fsdp2"
        )
    for name, variable in (
        ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"),
        ("Megatron-LM", "ACCELERATE_USE_MEGATRON_LM"),
    ):
        if os.environ.get(variable, "false").lower() == "true":
            raise InvalidInput(
                f"the launcher asks for {name}, which kvfold does not use; run kvfold distill RECIPE "
                f"--profile zero2, or "
                "zero3, by which FSDP 2 divides memory as DeepSpeed's stages do"
            )


def rework_layers(model: Any, *, checkpointing: bool, compiling: bool) -> None:
    """Have each layer computed again in the backward pass, or compiled; in place, names of weights do not
    change.

    The models' own switch for checkpointing works in training mode alone, and students are trained in
    evaluation mode.
    """
    if not (checkpointing or compiling):
        return
    for layer in decoder_layers(model):
        if checkpointing:
            layer.forward = _Recomputed(layer.forward)
        if compiling:
            layer.compile()


class _Recomputed:
    """A forward that keeps its inputs only; nothing in it draws random numbers."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def share(accelerator: Accelerator, module: nn.Module, model: Any, units: "Units | None" = None) -> nn.Module:
    """Make a module whose forward runs `model` one that all processes run together.

    Sharded, each decoder layer is a unit and all the rest one more, which the module's own forward gathers:
    the head is whole there, and only there. Gradients come out averaged over processes in either form.

    Args:
        accelerator: device and precision.
        module: called from now on in place of the model.
        model: the transformers model in it; its weights become shards in place.
        units: where it gets its weights from, if it has none yet.

    Raises:
        InvalidInput: a weight is NaN or infinite.
    """
    if not is_sharded():
        return cast(nn.Module, accelerator.prepare(module))
    bf16 = accelerator.mixed_precision == "bf16"
    # Gradients are added up in float32, and the loss comes out in it.
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bf16
        else MixedPrecisionPolicy()
    )
    _shard_layers(model, precision, units, "student")
    with units.rest() if units else nullcontext():
        return cast(nn.Module, fully_shard(module, mp_policy=precision, **_settings()))


def share_teacher(teacher: Any, units: "Units | None" = None) -> None:
    """Shard a teacher's model in place where the student is: its layers, what is around them, a head that is
    not the embedding.

    It is called through its base model, which is the root; the head is gathered where it is read.

    Args:
        teacher: left alone where it has no model, or one that is sharded already.
        units: where its model gets its weights from, if it has none yet.

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


def _shard_layers(model: Any, precision: MixedPrecisionPolicy, units: "Units | None", role: str) -> None:
    reshard = FullyShardedDataParallelPlugin().reshard_after_forward
    layers = decoder_layers(model)
    with (
        progress_bar(f"{role}'s layers", len(layers))
        if units
        else nullcontext(lambda done, note: None) as show
    ):
        for number, layer in enumerate(layers):
            with units.layer(number) if units else nullcontext():
                fully_shard(layer, reshard_after_forward=reshard, mp_policy=precision, **_settings())
            show(number + 1, "")


@torch.no_grad()
def call_inside(module: nn.Module, function: Callable[[], Any]) -> None:
    """Call a function in the place of a module's forward, where what is around its model's layers is gathered
    too.

    All processes must call it together; the function may run the model, uncompiled.
    """
    module.forward = lambda: function()
    try:
        with torch.compiler.set_stance("force_eager"):
            module()
    finally:
        del module.forward
    gather_no_more(module)


def _settings() -> dict[str, Any]:
    return (
        {"offload_policy": FullyShardedDataParallelPlugin().cpu_offload} if torch.cuda.is_available() else {}
    )


def gather_no_more(module: nn.Module) -> None:
    """After a forward without a backward.

    Let go of what was gathered, as a backward would have, so that weights are shards.
    """
    for unit in module.modules():  # where layers stay gathered after their forward, also those
        if isinstance(unit, FSDPModule):
            unit.reshard()


def unsynced(accelerator: Accelerator, module: nn.Module) -> AbstractContextManager[None]:
    """For all micro-batches of a step but the last: add gradients up here, and exchange them once.

    Not for shards: what is not exchanged would be held whole.
    """
    return nullcontext() if is_sharded() else accelerator.no_sync(module)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be a shard; all processes must ask for it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """What this process holds of a whole tensor that is divided and placed like another."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    # Every process has read the whole: nothing is sent.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's parameters, each once, by the names they have without adapters around them."""
    for name, parameter in model.named_parameters():
        yield name.replace(".base_layer.", "."), parameter
