"""Operators that torchvision declares when it is imported, for a torch without CUDA: `make test-vllm`.

The registry's torchvision is built for CUDA. Next to a torch for CPUs its library does not load, and its
import ends with `operator torchvision::nms does not exist`. vLLM's multimodal classes import it, for images
alone. Here the operators are declared and have no kernel: what calls one fails. Python imports this file when
it starts with the folder in PYTHONPATH.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[Any] = []  # a torch library ends with its object


class _BeforeTorchvision(MetaPathFinder):
    """A finder that finds nothing, and declares the operators when torchvision is looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(operator + _BOXES)
            _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
