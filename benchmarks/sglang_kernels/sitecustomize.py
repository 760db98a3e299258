"""A module `sgl_kernel` without kernels, for SGLang on a CPU: `make test-sglang`.

The registry's sgl_kernel is built for CUDA and does not load next to a torch for CPUs, and one for CPUs has
to be compiled for Intel's AMX. SGLang imports names of it at many places, and calls none of them where it
computes by torch (`--attention-backend torch_native`). Here each name exists, and what calls one fails.
Python imports this file when it starts with the folder in PYTHONPATH.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

NAME = "sgl_kernel"


class _Absent:
    """Something of sgl_kernel, which only has a name."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *given: Any, **named: Any) -> NoReturn:
        raise RuntimeError(f"{self.__name__} has no kernel here")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{NAME}.{name}")


class _Finder:
    """A finder and loader of sgl_kernel and every module in it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != NAME:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]

# Python imports one file of this name; the other declares torchvision's operators, which end with its names.
_TORCHVISION = runpy.run_path(
    str(Path(__file__).parent.parent / "torchvision_operators" / "sitecustomize.py")
)
