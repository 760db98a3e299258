"""The processes, devices and precision of a run, as a launcher and a recipe ask for them."""

import ctypes
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState

from ...core.errors import InvalidInput
from ..recipe.recipe import Recipe, Stage

# From glibc's malloc.h: blocks of at least this many bytes are mapped, and unmapped when they are freed.
_M_MMAP_THRESHOLD = -3


def is_sharded() -> bool:
    """Return whether the launcher asked for FSDP.

    accelerate itself answers for GPUs only. Its launcher sets the environment, which holds on a CPU as well.
    """
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def computes_in_bf16(recipe: Recipe) -> bool:
    """Return whether a run on this machine computes in bfloat16."""
    if recipe.precision != "auto":
        return recipe.precision == "bf16"
    return recipe.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def make_accelerator(recipe: Recipe, trackers_directory: Path | None = None) -> Accelerator:
    """Return the processes, devices and precision of a run, whose trackers write to a directory.

    Raises:
        InvalidInput: the launcher asks for something that kvfold does not support, accelerate runs in this
            process with another precision or device, or the windows of a step cannot be divided evenly among
            the processes.
    """
    # All processes wait while rank 0 tokenises and writes, which may take much longer than ten minutes.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))
    check_launcher()
    # Losses on layers alone leave the weights behind the last layer without a gradient.
    has_unused_weights = any(
        stage.how == "end_to_end" and stage.of_layers == stage.learnt for stage in recipe.stages
    )
    # The copies exchange the gradients themselves, not a second set of them.
    copies = DistributedDataParallelKwargs(
        find_unused_parameters=has_unused_weights, gradient_as_bucket_view=True
    )
    try:
        accelerator = Accelerator(
            cpu=recipe.device == "cpu",
            mixed_precision="bf16" if computes_in_bf16(recipe) else "no",
            kwargs_handlers=[patience, copies],
            log_with=list(recipe.trackers) or None,
            project_dir=trackers_directory,
        )
    except ValueError as mistake:
        if "already been initialized" not in str(mistake):
            raise
        running = AcceleratorState()
        precision = {"no": "fp32"}.get(running.mixed_precision, running.mixed_precision)
        device = running.device.type
        wanted = "bf16" if computes_in_bf16(recipe) else "fp32"
        raise InvalidInput(
            f"accelerate runs in this Python process already, with precision {precision} on {device}, and "
            f"this run takes precision {wanted} on {'cpu' if recipe.device == 'cpu' else device}; start "
            "another process for it"
        ) from None
    # A launcher's configuration may set this, and accelerate would then divide the loss by it. The loop
    # divides by tokens.
    accelerator.gradient_accumulation_steps = 1
    if is_sharded() and accelerator.device.type == "cpu":
        # glibc would otherwise keep the memory of every layer that was gathered and freed, which adds up to
        # several times the model.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 1 << 18)
    processes = accelerator.num_processes
    for stage in recipe.stages:
        windows = recipe.step_windows(stage)
        if windows % processes:
            enough = math.ceil(windows / processes) * processes * recipe.data.seq_len
            raise InvalidInput(
                f"batch_tokens {recipe.step_tokens(stage)} of stage {stage.name} is {windows} windows, which "
                f"cannot be divided evenly among {processes} processes; use batch_tokens {enough}"
            )
    return accelerator


def shards_models(stage: Stage) -> bool:
    """Return whether a stage's models are sharded. Alignment of layers needs whole models."""
    return is_sharded() and stage.how == "end_to_end"


def first_place(accelerator: Accelerator, stage: Stage) -> torch.device:
    """Return the device to load a stage's models on.

    A model that will be sharded is loaded on the CPU, and each of its units goes to the GPU in turn.
    """
    return torch.device("cpu") if shards_models(stage) else cast(torch.device, accelerator.device)


def check_launcher() -> None:
    """Refuse a launcher's configuration that kvfold does not support.

    Raises:
        InvalidInput: the launcher asks for FSDP 1, DeepSpeed or Megatron-LM.
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
                f"the launcher asks for {name}, which kvfold does not use; run kvfold distill RECIPE with "
                "--profile zero2 or zero3, which divide memory as DeepSpeed's stages do, with FSDP 2"
            )
