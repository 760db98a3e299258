"""A quantised checkpoint as the lazy mapping of the unquantised one: tensors are dequantised when read."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.system_calls import trim_memory
from ...core.untrusted import read_json
from ..directory import PIECE, Checkpoint, read_config
from ..shards import DTYPES, ShardWriter, TensorSpec, is_finite
from .packed_tensor import PackedTensor, StoredTensors, module_of
from .schemes import MODELOPT_FILE, SCHEMES, quantization_of
from .unconverted import OutputModules

# Tensors of a quantised module that do not change its weight.
_COMPANIONS = (
    "input_scale", "activation_scale", "input_global_scale", "input_zero_point", "output_scale",
    "weight_format", "weight_shape",
)  # fmt: skip
# Scales of the cache that a source's keys and values were given; no fold has these keys and values.
_CACHE = ("k_scale", "v_scale", "q_scale", "prob_output_scale")
# Families without biases, for whose modules AutoGPTQ nevertheless stores biases of zero.
_UNBIASED = ("llama", "mistral", "mixtral", "gemma", "gemma2", "phi3", "qwen3")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class QuantisedCheckpoint(Checkpoint):
    """A quantised model directory with the tensors of the unquantised model, which are float32 when read.

    Args:
        directory: the directory.
        stored: its tensors, where they are read from elsewhere.

    Attributes:
        config: content of config.json without its quantization_config.
        stored: the tensors as they are stored.
        method: the key of its row in `SCHEMES`.
        quantization: its quantization_config.
        packed: the tensors that are stored in parts, by name.

    Raises:
        InvalidInput: as of `Checkpoint`; kvfold does not read the method; a part is missing or misshapen.
    """

    def __init__(self, directory: Path, stored: Checkpoint | None = None) -> None:
        self.stored = Checkpoint(directory, packed=True) if stored is None else stored
        found = quantization_of(directory, self.stored.config)
        assert found is not None, "not a quantised checkpoint"
        self.directory = directory
        self.opened, self.origin = self.stored.opened, self.stored.origin
        self.left_out = self.stored.left_out
        self.method, self.quantization = found
        self.config = unquantised(self.stored.config)
        if isinstance(self.config.get("text_config"), dict):
            self.config["text_config"] = unquantised(self.config["text_config"])
        self._scheme = SCHEMES[self.method]
        specs = {name: self.stored.spec(name) for name in self.stored}
        tensors = StoredTensors(directory=directory, specs=specs, read=self.stored.__getitem__)
        try:
            self.packed = self._with_companions(self._scheme.find(tensors, self.quantization))
        except InvalidInput:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(
                f"the quantization_config of {directory} has values without a meaning for {self.method} "
                f"({error}); download the checkpoint again"
            ) from None
        if not self.packed:
            raise InvalidInput(
                f"{directory} has a quantization_config ({self.method}), but no quantised weight; remove the "
                "field, or download the checkpoint again"
            )
        self._specs = self._logical()

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, torch.float32) if name in self.packed else self.stored[name]

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and dtype of a tensor as it is read."""
        return self._specs[name]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a dtype; of a quantised one no more than a piece is ever float32."""
        if name not in self.packed:
            return self.stored.read(name, dtype)
        whole = torch.empty(self._specs[name].shape, dtype=dtype)
        flat = whole.flatten()
        for first, piece in self.stream(name):
            flat[first : first + len(piece)] = piece
        if len(flat) > PIECE:
            trim_memory()  # of the packed numbers and the pieces
        return whole

    def stream(self, name: str, by_rows: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in flat pieces of whole rows, as `Checkpoint.stream`.

        Raises:
            InvalidInput: a piece is NaN or infinite.
        """
        packed = self.packed.get(name)
        if packed is None:
            yield from self.stored.stream(name, by_rows)
            return
        parts = {role: self.stored[part] for role, part in packed.parts.items()}
        width = math.prod(packed.shape[1:])
        count = max(PIECE // max(width * packed.step, 1), 1) * packed.step
        for first in range(0, packed.shape[0], count):
            piece = packed.unpack(parts, first, min(count, packed.shape[0] - first))
            if not is_finite(piece):
                raise InvalidInput(
                    f"{name} of {self.directory} is NaN or infinite where it is dequantised; the checkpoint "
                    "is damaged"
                )
            yield first * width, piece.flatten()

    @property
    def files(self) -> list[Path]:
        """Return the weight files, sorted."""
        return self.stored.files

    def file_of(self, name: str) -> Path:
        """Return the weight file that holds a tensor, or its first part."""
        packed = self.packed.get(name)
        return self.stored.file_of(name if packed is None else packed.names[0])

    def identity(self) -> list[tuple[str, int, int]]:
        """Return what changes when the checkpoint does."""
        return self.stored.identity()

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names under which a tensor is stored."""
        return self.packed[name].names if name in self.packed else (name,)

    @property
    def is_named_in_config(self) -> bool:
        """Return whether config.json says how it is quantised; ModelOpt may say so in a file of its own."""
        text = self.stored.config.get("text_config")
        named = self.stored.config.get("quantization_config")
        return bool(named or (isinstance(text, dict) and text.get("quantization_config")))

    def cache_scales(self) -> list[str]:
        """Return the stored tensors that belong to none of its tensors: scales of the cache."""
        parts = {part for packed in self.packed.values() for part in packed.names}
        return [name for name in self.stored if name not in self._specs and name not in parts]

    def quantization_for(self, modules: OutputModules) -> dict[str, Any]:
        """Return the quantization_config of an output that keeps some of the quantised tensors."""
        return self._scheme.unconverted(dict(self.quantization), modules)

    def modelopt_file_for(self, modules: OutputModules) -> dict[str, Any] | None:
        """Return the content of hf_quant_config.json for such an output; None where the source has none."""
        file = self.directory / MODELOPT_FILE
        return self._scheme.unconverted(read_json(file), modules) if file.is_file() else None

    def _with_companions(self, found: Mapping[str, PackedTensor]) -> dict[str, PackedTensor]:
        """Return packed tensors with the other tensors of their modules."""
        taken = {part for packed in found.values() for part in packed.parts.values()}
        others: dict[str, list[str]] = {}
        owners = {module_of(name): name for name in found}
        for name in self.stored:
            module, _, last = name.rpartition(".")
            if module not in owners or name in taken:
                continue
            if last in _COMPANIONS or (last == "bias" and self._is_empty_bias(name)):
                others.setdefault(owners[module], []).append(name)
        return {name: replace(packed, others=tuple(others.get(name, ()))) for name, packed in found.items()}

    def _is_empty_bias(self, name: str) -> bool:
        """Return whether a bias is AutoGPTQ's, of zeros, in a family that has none."""
        has_biases = self.config.get("attention_bias") or self.config.get("mlp_bias")
        if self.method != "gptq" or has_biases or self.config.get("model_type") not in _UNBIASED:
            return False
        return not self.stored[name].any()

    def _logical(self) -> dict[str, TensorSpec]:
        """Return shapes and dtypes of the unquantised model's tensors, in the order of the files."""
        first = {packed.names[0]: name for name, packed in self.packed.items()}
        parts = {part for packed in self.packed.values() for part in packed.names}
        specs: dict[str, TensorSpec] = {}
        for name in self.stored:
            spec = self.stored.spec(name)
            if name in first:
                specs[first[name]] = TensorSpec(torch.float32, self.packed[first[name]].shape)
            elif name in self.packed and name not in parts:
                raise InvalidInput(
                    f"{self.directory} has {name} both quantised and unquantised; download or save it again"
                )
            elif name not in parts and name.rpartition(".")[2] not in _CACHE:
                if spec.dtype not in DTYPES.values():
                    raise InvalidInput(
                        f"{name} of {self.directory} is {str(spec.dtype).removeprefix('torch.')}, and no "
                        f"weight of {self.method} is stored like this; correct quantization_config, or "
                        "download it again"
                    )
                specs[name] = spec
        return specs


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without its quantization_config."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a model directory, quantised or not, as a mapping of float tensors.

    Raises:
        InvalidInput: as of `Checkpoint` and `QuantisedCheckpoint`.

    Example:
        >>> open_checkpoint(Path("Qwen3-8B-FP8"))["model.layers.0.mlp.up_proj.weight"].dtype
        torch.float32
    """
    if is_quantised(directory):
        return QuantisedCheckpoint(directory)
    return Checkpoint(directory)


def is_quantised(directory: Path) -> bool:
    """Return whether a model directory has quantised weights.

    Raises:
        InvalidInput: it has no config.json, or kvfold does not read the method.
    """
    return quantization_of(directory, read_config(directory)) is not None


def unquantised_dtype(checkpoint: QuantisedCheckpoint, names: Collection[str]) -> torch.dtype:
    """Return the dtype of most numbers that are not quantised; bfloat16 where all are."""
    counts: Counter[torch.dtype] = Counter()
    for name in names:
        spec = checkpoint.spec(name)
        if name not in checkpoint.packed and spec.dtype in _FLOATS:
            counts[spec.dtype] += math.prod(spec.shape)
    return counts.most_common(1)[0][0] if counts else torch.bfloat16


def as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint's tensors as they are stored: the parts of a quantised one."""
    return checkpoint.stored if isinstance(checkpoint, QuantisedCheckpoint) else checkpoint


def stored_specs(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, TensorSpec]:
    """Return shapes and dtypes of tensors as they are stored: those of its parts for a quantised tensor."""
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return {name: checkpoint.spec(name) for name in names}
    parts = [part for name in names for part in checkpoint.parts(name)]
    return {part: checkpoint.stored.spec(part) for part in parts}


def copy_stored(checkpoint: Checkpoint, names: Collection[str], writer: ShardWriter) -> None:
    """Write tensors as they are stored, a piece at a time; arguments as of `stored_specs`."""
    stored = checkpoint.stored if isinstance(checkpoint, QuantisedCheckpoint) else checkpoint
    for part in stored_specs(checkpoint, names):
        for first, piece in stored.stream(part):
            writer.write(part, piece, first)
