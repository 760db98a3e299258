"""One pass over the windows: every model reads the same tokens, and logits exist for one chunk of tokens at a time.

Shapes: N windows, B windows of a batch, W tokens of a window, T = W - 1 scored tokens, C tokens of a chunk,
V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..convert.console import progress
from ..convert.errors import InvalidInput
from .fidelity import common_vocabulary, token_kl
from .head import check_head, last_hidden
from .models import Loaded

CHUNK = 1024  # tokens: 0.5 GB of float32 logits a model at a vocabulary of 128k
_PROBE = 16  # tokens on which the short way to the logits is compared with the model's own


@dataclass(frozen=True)
class Scores:
    """Every scored token of every window, float64 on the CPU.

    Attributes:
        nll: negative log likelihood (N, T) in nats, by the model's role.
        kl_NT: KL(teacher || student) in nats; None without a teacher.
        same_NT: 1 where student and teacher find the same token most probable, else 0; None without a teacher.
    """

    nll: dict[str, Tensor]
    kl_NT: Tensor | None
    same_NT: Tensor | None


@torch.inference_mode()
def score(models: Mapping[str, Loaded], ids_NW: Tensor, batch_size: int, chunk: int = CHUNK) -> Scores:
    """Score the windows with all models at once.

    Args:
        models: by role: `student`, and where there are any `teacher` and `parent`. They share a device.
        ids_NW: token ids, int64.
        batch_size: B.
        chunk: C.

    Raises:
        InvalidInput: a model gives a logit that is not finite, or its logits are not its output embedding applied to its last
            hidden state.
    """
    for loaded in models.values():
        check_head(loaded, ids_NW[:1, :_PROBE])
    starts = range(0, len(ids_NW), batch_size)
    batches = [
        _score_batch(models, ids_NW[start : start + batch_size], chunk, start)
        for start in progress(starts, "Scoring", total=len(starts))
    ]
    gathered = {measure: torch.cat([batch[measure] for batch in batches]) for measure in batches[0]}
    return Scores({role: gathered[role] for role in models}, gathered.get("kl"), gathered.get("same"))


def _score_batch(models: Mapping[str, Loaded], ids_BW: Tensor, chunk: int, first: int) -> dict[str, Tensor]:
    """Measures (B, T) of one batch, whose first window is number `first`: an NLL a role, and `kl` and `same` with a teacher."""
    scored = ids_BW.shape[1] - 1
    targets = ids_BW[:, 1:].flatten()
    hidden = {role: last_hidden(loaded, ids_BW)[:, :-1].flatten(0, 1) for role, loaded in models.items()}
    chunks: dict[str, list[Tensor]] = {}
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        logp = {}
        for role, loaded in models.items():
            logits_CV = loaded.model.get_output_embeddings()(hidden[role][part]).float()
            broken = (~logits_CV.isfinite().all(-1)).nonzero()
            if len(broken):
                window = first + (start + int(broken[0])) // scored
                raise InvalidInput(f"the {role}, {loaded.path}, gives logits that are not finite in window {window}")
            logp[role] = logits_CV.log_softmax(-1)
            wanted = targets[part].to(logits_CV.device)
            chunks.setdefault(role, []).append(-logp[role].gather(1, wanted[:, None])[:, 0])
        if "teacher" in logp:
            teacher_CV, student_CV = common_vocabulary(logp["teacher"], logp["student"])
            chunks.setdefault("kl", []).append(token_kl(teacher_CV, student_CV))
            chunks.setdefault("same", []).append(teacher_CV.argmax(-1) == student_CV.argmax(-1))
    return {measure: torch.cat(parts).cpu().double().view(-1, scored) for measure, parts in chunks.items()}
