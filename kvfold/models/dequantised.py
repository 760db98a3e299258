"""Models made of a checkpoint's tensors as kvfold reads them, without the vendor's kernels.

Each weight is read, and dequantised, when it is needed, so that memory holds the unquantised model and one
packed tensor.
"""

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.directory import Checkpoint, copy_side_files
from ..checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, is_quantised
from ..checkpoints.shards import SHARD_SIZE, ShardWriter, TensorSpec
from ..core.errors import InvalidInput


class _LazyWeight:
    """A tensor of a checkpoint that transformers reads like a slice of a safetensors file."""

    def __init__(self, weights: "LazyWeights", name: str) -> None:
        self._weights = weights
        self._name = name
        spec = weights.checkpoint.spec(name)
        self.dtype = spec.dtype
        self.shape = spec.shape

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self._weights.read(self._name)


class LazyWeights:
    """The tensors of a checkpoint for a model in one dtype.

    Args:
        checkpoint: the source of the tensors.
        dtype: that quantised tensors are read in; others keep theirs.

    Attributes:
        checkpoint: the same.
        failure: the first error of reading one, which transformers passes over.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.failure: InvalidInput | None = None
        self._dtype = dtype
        self._lock = threading.Lock()  # transformers reads in several threads; one tensor is unpacked at once

    def state_dict(self) -> dict[str, Any]:
        """Return every tensor by its name; none is read yet."""
        return {name: _LazyWeight(self, name) for name in self.checkpoint}

    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            InvalidInput: it holds NaN or infinite values, or its file has become shorter.
        """
        try:
            if isinstance(self.checkpoint, QuantisedCheckpoint) and name in self.checkpoint.packed:
                with self._lock:
                    return self.checkpoint.read(name, self._dtype)
            return self.checkpoint[name]
        except InvalidInput as error:
            self.failure = self.failure or error
            raise


def from_tensors(loader: Any, checkpoint: Checkpoint, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint's tensors, wherever they are read from, into the unquantised model.

    Args:
        loader: `AutoModelForCausalLM`, or the class to load.
        checkpoint: the tensors; its directory has the config.json of the model.
        options: of `from_pretrained`.

    Returns:
        The model, and transformers' report of missing and misshapen weights.

    Raises:
        InvalidInput: the checkpoint needs code of its own, or a weight is damaged.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = checkpoint.directory
    if options.pop("trust_remote_code"):
        raise InvalidInput(
            f"{directory} is quantised and has code of its own, which kvfold cannot load together; fold it "
            "with --dequantize first"
        )
    is_auto = loader is AutoModelForCausalLM
    reader = AutoConfig if is_auto else loader.config_class
    local = {"local_files_only": True, "trust_remote_code": False}
    config = without_quantisation(reader.from_pretrained(directory, **local))
    if is_auto and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput(f"{directory} is no causal language model of transformers; name one")
    chosen = options.get("dtype")
    if not isinstance(chosen, torch.dtype):
        chosen = config.dtype or torch.bfloat16 if chosen in (None, "auto") else getattr(torch, str(chosen))
    weights = LazyWeights(checkpoint, chosen)
    model, info = (MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if is_auto else loader).from_pretrained(
        None, config=config, state_dict=weights.state_dict(), **{**options, "dtype": chosen}
    )
    if weights.failure is not None:
        raise weights.failure
    model.config.name_or_path = str(directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model, info


def without_quantisation(config: Any) -> Any:
    """Return a transformers configuration of the unquantised model; the argument is changed."""
    for part in (config, getattr(config, "text_config", None)):
        if part is not None and hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


@contextmanager
def dequantised_copy(directory: Path) -> Iterator[Path]:
    """Make a temporary copy with bfloat16 in place of quantised weights, for a process without kvfold.

    One tensor is in memory at a time.

    Args:
        directory: a checkpoint; one that is not quantised is given back itself. Python files next to its
            weights are copied, so they must be trusted.

    Raises:
        InvalidInput: a weight is damaged.
    """
    if not is_quantised(directory):
        yield directory
        return
    checkpoint = QuantisedCheckpoint(directory)
    specs = {name: checkpoint.spec(name) for name in checkpoint}
    specs |= {name: TensorSpec(torch.bfloat16, specs[name].shape) for name in checkpoint.packed}
    with tempfile.TemporaryDirectory(prefix="kvfold-") as place:
        copy = Path(place)
        with ShardWriter(copy, specs, SHARD_SIZE) as writer:
            for name in checkpoint:
                for first, piece in checkpoint.stream(name):
                    writer.write(name, piece, first)
        (copy / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
        copy_side_files(directory, copy)
        for file in directory.glob("*_kvfold.py"):
            shutil.copyfile(file, copy / file.name)
        yield copy
