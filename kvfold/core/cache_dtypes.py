"""The number formats that engines store a cache in, as rounding on any device.

Values are written once and read at every later step, so what a format loses is decided when they are written:
`stored` returns what a read gives back. Before that, this module loads no torch: `--help` names formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

CacheDtypeName = Literal["bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8", "int4"]  # keys of CACHE_DTYPES
_FLOATS = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # by their names in torch
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of four bits (OCP Microscaling, section 5.3.3)
_E2M1_STEP = 0.37  # between two of them, as a share of the number: half to a quarter


@dataclass(frozen=True)
class CacheDtype:
    """One format.

    Attributes:
        name: as users and engines write it.
        bits: of one number, without its share of a scale.
        group: how many numbers share a stored scale; 0 where one fixed beforehand serves a whole tensor, None
            where all numbers of one token and head (of a latent: of one token) share it.
        scale_bits: of one stored scale.
    """

    name: str
    bits: int
    group: int | None = 0
    scale_bits: int = 0

    def bytes(self, width: int) -> float:
        """Return the bytes of `width` numbers of one token and head, with their scales."""
        scales = 0
        if self.group != 0 and width:
            scales = -(-width // (self.group or width))
        return (width * self.bits + scales * self.scale_bits) / 8

    def stored(self, values: Tensor, scale: float = 1.0) -> Tensor:
        """Return values as a later step reads them from the cache.

        Args:
            values: (..., width), any floating dtype; the last dimension is what one token and head writes.
            scale: of the tensor, in fp8 and nvfp4; the checkpoint's number, 1.0 where it has none. Formats
                with a scale per token ignore it.

        Returns:
            The shape and dtype of `values`. Beyond the format's largest number they are clamped to it.

        Example:
            >>> import torch
            >>> cache_dtype("fp8_e4m3").stored(torch.tensor([0.3, 1000.0])).tolist()
            [0.3125, 448.0]
        """
        import torch

        if self.name == "bfloat16":
            return values.bfloat16().to(values.dtype)
        given = values.float()
        if self.name in _FLOATS:
            kind = getattr(torch, _FLOATS[self.name])
            most = torch.finfo(kind).max
            read = (given / scale).clamp(-most, most).to(kind).float() * scale
        elif self.name == "nvfp4":
            read = _nvfp4(given, scale)
        else:
            most = 2 ** (self.bits - 1) - 1
            step = given.abs().amax(-1, keepdim=True) / most
            read = (given / step.clamp(min=torch.finfo(torch.float32).tiny)).round() * step
        return read.to(values.dtype)

    def passed(self, values: Tensor, scale: float = 1.0) -> Tensor:
        """Return the same as `stored`, with a gradient: a straight-through estimate (arXiv 1308.3432).

        The rounding error counts as a fixed share of the number that decides its size: the largest of those
        that share a scale in int8 and int4, the number itself in fp8, and in nvfp4 the one whose steps are
        larger. So the gradient knows that larger numbers round worse. In bfloat16 nothing is rounded.

        Args:
            values: as for `stored`.
            scale: as for `stored`.

        Example:
            >>> import torch
            >>> values = torch.tensor([0.3, 7.0], requires_grad=True)
            >>> cache_dtype("int4").passed(values).sum().backward()
            >>> values.grad  # 0.3 is read as 0: by more, the larger the number it shares a scale with
            tensor([1.0000, 0.9571])
        """
        import torch

        if self.name == "bfloat16":
            return values
        given = values.detach()
        error = self.stored(given, scale) - given
        if self.name in _FLOATS:
            size = values.abs()
        elif self.group is None:
            size = values.abs().amax(-1, keepdim=True)
        else:
            width = values.shape[-1]
            padded = torch.nn.functional.pad(values, (0, -width % self.group)).unflatten(-1, (-1, self.group))
            largest = padded.abs().amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., :width]
            size = torch.maximum(largest / 12, values.abs() * _E2M1_STEP)
        least = torch.finfo(values.dtype).tiny
        return values + size * (error / size.detach().clamp(min=least))


CACHE_DTYPES = {
    kind.name: kind
    for kind in (
        CacheDtype("bfloat16", 16),
        CacheDtype("fp8_e4m3", 8),
        CacheDtype("fp8_e5m2", 8),
        CacheDtype("nvfp4", 4, group=16, scale_bits=8),
        CacheDtype("int8", 8, group=None, scale_bits=32),
        CacheDtype("int4", 4, group=None, scale_bits=32),
    )
}


def cache_dtype(name: str) -> CacheDtype:
    """Return a format by its name.

    Raises:
        InvalidInput: there is no such format.
    """
    if not isinstance(name, str) or name not in CACHE_DTYPES:
        raise InvalidInput(f"cache dtype {name!r} is not known; use one of {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[name]


def _nvfp4(values: Tensor, scale: float) -> Tensor:
    """Round to four bits with an e4m3 scale per 16 numbers; a last group may be shorter."""
    import torch

    width = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -width % 16)).unflatten(-1, (-1, 16))
    largest = torch.finfo(torch.float8_e4m3fn).max
    share = (padded.abs().amax(-1, keepdim=True) / (6 * scale)).clamp(max=largest)
    step = share.to(torch.float8_e4m3fn).float() * scale
    ratio = padded / step.clamp(min=torch.finfo(torch.float32).tiny)
    grid = torch.tensor(_E2M1, device=values.device)
    middle = (grid[1:] + grid[:-1]) / 2
    # Half way, the neighbour whose last bit is zero: down from 0.25, 1.25, 2.5 and 5, up from the rest.
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros_like(middle[1::2]))
    read: Tensor = grid[torch.bucketize(ratio.abs().contiguous(), middle)] * ratio.sign() * step
    return read.flatten(-2)[..., :width]
