"""Tensors that may be sharded: the whole of one, this process's part of one, and the names of weights.

Training states hold whole tensors, so that a run can resume with another number of processes.

Shapes: any.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be a shard. All processes must call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this process holds, divided and placed as `like` is."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    # Every process has read the whole tensor, so nothing is sent.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's parameters, each once, under the names that they have without adapters."""
    for name, parameter in model.named_parameters():
        yield name.replace(".base_layer.", "."), parameter
