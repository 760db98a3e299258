"""The schemes of `kvfold quantize`, and the rounding of one weight, both by the package compressed-tensors.

Every scheme rounds to nearest and needs no text. A scale belongs to a row, or to a group of a row's columns,
so rows are rounded apart from each other and a weight is never in memory whole. Activations, where a scheme
has 8-bit ones, get a scale per token while the model runs.

Legend: R rows (output features), C columns (input features), G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoints.shards import TensorSpec
from ..core.errors import InvalidInput
from .request import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Collection

    from compressed_tensors.quantization import QuantizationScheme

PACKAGE = "compressed_tensors"
_TARGETS = ["Linear"]  # every linear module that `ignore` does not name
_SHAPE = "weight_shape"  # the part that states the whole weight's shape


def check_package() -> None:
    """Refuse to start without compressed-tensors.

    Raises:
        InvalidInput: it is not installed.
    """
    if find_spec(PACKAGE) is None:
        raise InvalidInput(
            "kvfold quantize needs the package compressed-tensors; install it: pip install 'kvfold[quantize]'"
        )


@dataclass(frozen=True)
class Rounding:
    """A scheme at a size of its groups.

    Attributes:
        scheme: how compressed-tensors describes it.
        format: the layout in which it stores weights, such as `pack-quantized`.
    """

    scheme: QuantizationScheme
    format: str

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None where a whole row does."""
        assert self.scheme.weights is not None
        size: int | None = self.scheme.weights.group_size
        return size

    def parts(self, rows_RC: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Round some rows of a weight.

        Args:
            rows_RC: the rows, in any float dtype.
            dtype: of the scales.

        Returns:
            The stored tensors by their names in the module, such as `weight_packed` and `weight_scale`.
        """
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        assert self.scheme.weights is not None
        rows_RC = rows_RC.to(torch.float32)
        fields = rows_RC[:, None] if self.group is None else rows_RC.unflatten(1, (-1, self.group))
        low_RG, high_RG = torch.aminmax(fields, dim=-1)
        scale_RG, zero_RG = calculate_qparams(low_RG, high_RG, self.scheme.weights)
        state = {
            "weight": rows_RC,
            "weight_scale": _stored_scale(scale_RG, dtype),
            "weight_zero_point": zero_RG,
        }
        found: dict[str, Tensor] = BaseCompressor.get_value_from_registry(self.format).compress(
            state, self.scheme
        )
        return found

    def specs(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return shapes and dtypes of the stored tensors of a weight (R, C); arguments as of `parts`."""
        one_row = self.parts(torch.zeros(1, shape[1]), dtype)
        return {
            name: TensorSpec(part.dtype, tuple(part.shape) if name == _SHAPE else (shape[0], *part.shape[1:]))
            for name, part in one_row.items()
        }

    def whole_parts(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the stored tensors that depend on a weight's shape alone; `parts` has them of its rows."""
        return {_SHAPE: torch.tensor(shape)} if self.format == "pack-quantized" else {}

    def config(self, ignore: Collection[str]) -> dict[str, Any]:
        """Return the quantization_config of a checkpoint."""
        from compressed_tensors.quantization import QuantizationConfig

        made = QuantizationConfig(
            config_groups={"group_0": self.scheme},
            format=self.format,
            quantization_status="compressed",
            ignore=list(ignore),
        )
        found: dict[str, Any] = made.model_dump(mode="json")
        return found


def _stored_scale(scale_RG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in the dtype that stores them.

    Those below its normal numbers are rounded up: float16 would make them zero, which holds no weight, or so
    much smaller that the largest weights are cut off.
    """
    least = torch.finfo(dtype).smallest_normal
    step = least * torch.finfo(dtype).eps
    return torch.where(scale_RG < least, (scale_RG / step).ceil() * step, scale_RG).to(dtype)


def rounding(name: str, group: int | None) -> Rounding:
    """Return a scheme of `SCHEMES` at a size of its groups.

    Raises:
        InvalidInput: compressed-tensors is not installed.
    """
    check_package()
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(SCHEMES[name].preset, _TARGETS)
    assert scheme.weights is not None
    if group is not None:
        scheme.weights.group_size = group
    return Rounding(scheme, str(infer_module_format(torch.nn.Linear, scheme).value))
