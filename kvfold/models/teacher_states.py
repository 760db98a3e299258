"""The teacher's last hidden states on disk: it runs once, alone, and any number of students are then compared
with it.

Hidden states take as much space as the vocabulary is wider than they are less than logits would, and give the
same logits to the bit. One file a window, the head beside them; the manifest says of which model, tokens and
precision they are.

Legend: B windows of a batch, T positions that may be scored, D hidden size, C tokens, V vocabulary.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from ..core.errors import InvalidInput
from .causal_lm import Described, Loaded
from .finite import refuse
from .head import HeadForm, head_form, last_hidden

_MANIFEST = "manifest.json"
_SCHEMA = 1


class Kept:
    """Hidden states of the windows that a directory holds, and the head that makes logits of them."""

    def __init__(
        self, directory: Path, teacher: Described, device: torch.device, manifest: dict[str, Any]
    ) -> None:
        """Open or begin a directory.

        Args:
            directory: where; made where it is not there.
            teacher: whose states they are.
            device: where logits are wanted.
            manifest: what the states depend on: the teacher's identity, the tokens' hash, precision, device.

        Raises:
            InvalidInput: the directory holds something else, or states that depend on something else.
        """
        self.path, self.vocabulary = teacher.path, teacher.vocabulary
        self._directory, self._device = directory, device
        wanted = {"kvfold_teacher_cache": _SCHEMA, **manifest}
        file = directory / _MANIFEST
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            differing = sorted(
                key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)
            )
            if differing:
                raise InvalidInput(
                    f"--teacher-cache {directory} was made with another {', '.join(differing)}; name "
                    f"another directory"
                )
        elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InvalidInput(
                f"--teacher-cache {directory} is no cache of a teacher; name another directory"
            )
        else:
            directory.mkdir(parents=True, exist_ok=True)
            _write(file, json.dumps(wanted, indent=2).encode())
        self._head: dict[str, Tensor] = {}
        self._form = HeadForm()

    def missing(self, windows: Sequence[int]) -> list[int]:
        """Which of the windows it does not hold."""
        return [window for window in windows if not self._window(window).is_file()]

    def check_space(self, windows: int, loaded: Loaded, tokens: int) -> None:
        """Compare what so many windows take with what is free.

        Raises:
            InvalidInput: says both.
        """
        head = loaded.model.get_output_embeddings().weight
        needed = head.element_size() * (windows * tokens * head.shape[1] + head.numel())
        free = shutil.disk_usage(self._directory).free
        if needed > free:
            raise InvalidInput(
                f"--teacher-cache {self._directory}: the hidden states take {needed / 1e9:.1f} GB and "
                f"{free / 1e9:.1f} GB are "
                "free; name a directory elsewhere, or read fewer windows with --max-windows"
            )

    def keep(self, loaded: Loaded, first: int, ids_BW: Tensor) -> None:
        """Run the teacher on windows number `first` and on, and keep what its head would read.

        Raises:
            InvalidInput: that is not finite.
        """
        if not (self._directory / "head.safetensors").is_file():
            head, form = loaded.model.get_output_embeddings(), head_form(loaded.model)
            tensors = {name: value.detach().cpu().contiguous() for name, value in _whole(head).items()}
            form_E = torch.tensor(
                [form.scale, float("inf") if form.soft_cap is None else form.soft_cap], dtype=torch.float64
            )
            _save(self._directory / "head.safetensors", {**tensors, "form": form_E})
        for number, hidden_TD in enumerate(last_hidden(loaded, ids_BW[:, :-1]), first):
            if not bool(hidden_TD.isfinite().all()):
                raise refuse("teacher", loaded, ids_BW[number - first, :-1][None], number)
            _save(self._window(number), {"hidden_TD": hidden_TD.cpu().contiguous()})

    def hidden(self, first: int, ids_BW: Tensor) -> Tensor:
        """(B, T, D) of windows number `first` and on."""
        states = [load_file(self._window(first + row))["hidden_TD"] for row in range(len(ids_BW))]
        return torch.stack(states).to(self._device)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """The teacher's logits (C, V), in its dtype."""
        if not self._head:
            tensors = load_file(self._directory / "head.safetensors")
            scale, cap = tensors.pop("form").tolist()
            self._form = HeadForm(scale, None if cap == float("inf") else cap)
            self._head = {name: value.to(self._device) for name, value in tensors.items()}
        return self._form.logits(functional.linear(hidden_CD, self._head["weight"], self._head.get("bias")))

    def refusal(self, role: str, ids_1W: Tensor, window: int) -> InvalidInput:
        """For logits that are not finite though the hidden states are: `keep` refuses those."""
        return InvalidInput(
            f"the {role}, {self.path}, gives logits that are not finite in window {window}; its head "
            f"overflows"
        )

    def _window(self, number: int) -> Path:
        return self._directory / f"window-{number:06d}.safetensors"


def hash_of(ids_NW: Tensor) -> str:
    """Hexadecimal SHA-256 of token ids and their shape."""
    return hashlib.sha256(
        f"{tuple(ids_NW.shape)}".encode() + ids_NW.contiguous().numpy().tobytes()
    ).hexdigest()


def _whole(head: Any) -> dict[str, Tensor]:
    """A head's tensors; accelerate keeps those that it has put on the disk elsewhere."""
    weights = getattr(getattr(head, "_hf_hook", None), "weights_map", None)
    return {
        name: value if weights is None or not value.is_meta else weights[name]
        for name, value in head.named_parameters()
    }


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")  # another process may be writing the same
    save_file(tensors, partial)
    partial.rename(file)


def _write(file: Path, content: bytes) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")  # another process may be writing the same
    partial.write_bytes(content)
    partial.rename(file)
