"""Predictions as last hidden states and head, so that a loss can form logits a few tokens at a time.

Shapes: T tokens, V vocabulary, D hidden size, B windows, S tokens of a window, C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...models.head import HeadForm, head_form
from ..data.batch import Batch


class Predictions(NamedTuple):
    """A model's predictions for T tokens, before the head: logits = form(h Wᵀ + b).

    Attributes:
        hidden_TD: last hidden states, after the final norm.
        weight_VD: the head.
        bias_V: its bias, if it has one.
        form: the step from the head's output to logits.
    """

    hidden_TD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    form: HeadForm = HeadForm()

    def at(self, kept_T: Tensor) -> "Predictions":
        """Return the predictions for the tokens where the mask is true."""
        return self._replace(hidden_TD=self.hidden_TD[kept_T])

    @property
    def vocabulary(self) -> int:
        """The number of logits per token, padding included."""
        return len(self.weight_VD)

    def computed_in(self, dtype: torch.dtype) -> "Predictions":
        """Return the same predictions with hidden states, weight and bias in one dtype."""
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return self._replace(
            hidden_TD=self.hidden_TD.to(dtype), weight_VD=self.weight_VD.to(dtype), bias_V=bias_V
        )

    def logits(self, rows: slice) -> Tensor:
        """Return the logits (C, V) of some tokens.

        The product has the dtype of its factors; the following steps are in at least float32.
        """
        output_CV = linear(self.hidden_TD[rows], self.weight_VD, self.bias_V)
        return self.form.logits(output_CV.to(torch.promote_types(output_CV.dtype, torch.float32)))


def predict(model: Any, batch: Batch) -> Predictions:
    """Run a causal language model up to its head; tokens of all B windows of S in one row of T = B S.

    Call it inside the forward of the module that a wrapper (DDP, FSDP2) holds: only there do weights and
    gradients of all processes meet. `check_head` of kvfold/models/head.py must have accepted the model.
    """
    hidden_BSD = model.base_model(**batch.inputs, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    bias_V = getattr(head, "bias", None)
    return Predictions(
        hidden_BSD.flatten(0, 1),
        all_rows(head.weight),
        None if bias_V is None else all_rows(bias_V),
        head_form(model),
    )


def all_rows(parameter: Tensor) -> Tensor:
    """Return a head's parameter with all of its rows, also where data parallelism has sharded it (a DTensor).

    Every process forms the gradient of its own tokens for the whole head. The shard's gradient is their mean,
    as with every other weight under data parallelism. DTensor's default takes the gradients of all processes
    for equal and keeps its own, which is another gradient. Tensor parallelism, where they would be equal, is
    not supported here.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(parameter, DTensor)
    gathered: Tensor = parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)
    return gathered
