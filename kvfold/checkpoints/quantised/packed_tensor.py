"""A quantised tensor in its stored parts, and the checks of their names, shapes and dtypes.

Legend: R rows (output features), C columns (input features).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ..shards import TensorSpec

Shape = tuple[int, ...]
Parts = Mapping[str, Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POWERS = (torch.float8_e8m0fnu, torch.uint8)  # scales that are powers of two: an exponent per byte


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A tensor of the unquantised model that is stored in parts.

    Attributes:
        shape: of the unquantised tensor.
        parts: names of the stored tensors by role; the first one holds the numbers, the others scale them.
        unpack: from the parts, a first row and a number of rows to these rows of the tensor, float32.
        step: `unpack` takes multiples of so many rows, except at the end.
        others: names of stored tensors that belong to the module and do not change the weight.
    """

    shape: Shape
    parts: Mapping[str, str]
    unpack: Callable[[Parts, int, int], Tensor]
    step: int = 1
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return every stored tensor of it."""
        return (*self.parts.values(), *self.others)


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """The tensors of a quantised checkpoint as they are stored.

    Attributes:
        directory: of the checkpoint.
        specs: shapes and dtypes by name.
        read: returns a tensor by its name.
    """

    directory: Path
    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]

    def ending(self, suffix: str) -> list[str]:
        """Return the names with an ending, without it."""
        return [name.removesuffix(suffix) for name in self.specs if name.endswith(suffix)]

    def require(
        self, name: str, owner: str, shapes: Collection[Shape], dtypes: Collection[torch.dtype]
    ) -> str:
        """Return a part's name after checking that it is stored as its tensor needs it.

        `owner` is the tensor that needs it; it may have any of the shapes, or any shape where none is given.

        Raises:
            InvalidInput: it is missing, or has another shape or dtype.
        """
        found = self.specs.get(name)
        if found is None:
            raise InvalidInput(
                f"{self.directory} has no {name}, without which the quantised {owner} cannot be read; "
                "download or save it again"
            )
        if found.dtype not in dtypes:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise InvalidInput(
                f"{name} of {self.directory} is {str(found.dtype).removeprefix('torch.')}, where the "
                f"quantised {owner} needs {kinds}; download or save it again"
            )
        if shapes and found.shape not in shapes:
            wanted = " or ".join(map(str, dict.fromkeys(shapes)))
            raise InvalidInput(
                f"{name} of {self.directory} has shape {found.shape}, where the quantised {owner} needs "
                f"{wanted}; correct quantization_config, or download it again"
            )
        return name

    def shape(self, name: str, dimensions: int) -> Shape:
        """Return a tensor's shape, which must have so many dimensions.

        Raises:
            InvalidInput: it has another number of them.
        """
        found = self.specs[name].shape
        if len(found) != dimensions:
            raise InvalidInput(
                f"{name} of {self.directory} has shape {found}, where this part of a quantised weight has "
                f"{dimensions} dimension{'s' * (dimensions > 1)}; download or save it again"
            )
        return found

    def group_of_columns(self, name: str, groups: Tensor, count: int) -> Tensor:
        """Return the numbers of groups, from the part of this name, as indices.

        Raises:
            InvalidInput: one of them is not below `count`.
        """
        for value in map(int, groups.aminmax()):
            if not 0 <= value < count:
                raise InvalidInput(
                    f"{name} of {self.directory} holds {value}, where numbers from 0 to {count - 1} are "
                    "possible; the checkpoint is damaged"
                )
        return groups.long()


def as_scale(stored: Tensor) -> Tensor:
    """Return scales as float32; bytes are exponents of two (E8M0), and 255 is NaN."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    return stored.to(torch.float32)


def module_of(name: str) -> str:
    """Return the module that a weight belongs to, or its own name where it is not called `weight`."""
    return name.removesuffix(".weight")


# The sixteen values of a four-bit float with two bits of exponent and one of mantissa (E2M1).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
WORD = 32  # bits
WIDTHS = (2, 4, 8)  # bits of a number that words hold without a remainder


def nibbles(bytes_X: Tensor, *, high_first: bool = False) -> Tensor:
    """Return the two four-bit numbers of each byte along the last dimension, uint8."""
    low, high = bytes_X & 0xF, bytes_X >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, -1).flatten(-2)


def fp4(bytes_X: Tensor) -> Tensor:
    """Return the two E2M1 numbers of each byte, low bits first, float32."""
    return torch.tensor(FP4_VALUES)[nibbles(bytes_X).int()]


def fields(words: Tensor, bits: int, dimension: int) -> Tensor:
    """Return the unsigned numbers of each 32-bit word, lowest bits first, along a dimension, int32.

    Words have two dimensions, int32; `bits` divides 32.
    """
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    if dimension == 0:
        spread: Tensor = words[:, None, :] >> shifts[None, :, None]
    else:
        spread = words[:, :, None] >> shifts
    return spread.bitwise_and_(2**bits - 1).flatten(dimension, dimension + 1)
