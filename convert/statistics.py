"""What a source model does on tokens, in one streaming pass: the numbers from which the cost of a fold is predicted.

A fold that changes the key rows by Δ costs about ½ tr(G Δ C Δᵀ) nats a token (K-FAC, arXiv 1503.05671), with C the second
moment of the attention's input and G that of the gradient of the log likelihood at the keys; values likewise. Labels are drawn
from the model itself, so that G is the true Fisher. Activations are reduced where they arise and dropped: memory does
not depend on how many tokens are read.

Legend: attention.py; E = D + 1, the input with the constant 1 as its last entry; T tokens of a sequence and distances;
B sequences of a batch; X = B·T tokens of a batch; V vocabulary. Projections are seen before RoPE, in the half layout.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from .calibration import check_length, draw
from .console import progress
from .errors import InvalidInput

SCHEMA = 1
_LABELS = 0x5EED1ABE  # sets the draw of labels apart from the draw of a text with the same seed
_LOGITS = 2**24  # of the vocabulary head that exist at once


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """One layer's means over tokens, float64, on the CPU.

    Attributes:
        input_EE: C = E[x̃ x̃ᵀ], x̃ = [x; 1] with x the input of the q, k and v projections: the last row is the mean.
        query_NHH: E[q qᵀ] of every query head, bias included.
        key_fisher: G_K (K·H, K·H), E[g gᵀ] with g the gradient of a sequence's log likelihood, nats, at one token's keys.
        value_fisher: G_V, the same at the values.
        distance_NT: how a query head's attention p spreads over distances Δ = query - key position: the mass of p(1-p), which
            is what an error in a score moves; rows sum to 1.
    """

    input_EE: Tensor
    query_NHH: Tensor
    key_fisher: Tensor
    value_fisher: Tensor
    distance_NT: Tensor


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of all layers, and where they come from.

    Attributes:
        layers: in the model's order.
        tokens: how many tokens were read.
        calibration: `self`, `text:<name>`, ...
        seed: of the tokens' and the labels' draw.
    """

    layers: tuple[LayerStatistics, ...]
    tokens: int
    calibration: str
    seed: int

    def save(self, file: Path) -> None:
        """Write a safetensors file, which must not exist; it appears only when complete.

        Raises:
            InvalidInput: the file exists or cannot be written.
        """
        if file.exists():
            raise InvalidInput(f"{file} exists, and nothing is overwritten; name another file for the statistics")
        about = {"tokens": self.tokens, "calibration": self.calibration, "seed": self.seed, "layers": len(self.layers)}
        tensors = {
            f"{n}.{name}": tensor.contiguous() for n, layer in enumerate(self.layers) for name, tensor in vars(layer).items()
        }
        partial = file.with_name(file.name + ".partial")
        try:
            save_file(tensors, partial, {"kvfold.statistics": json.dumps({"schema": SCHEMA, **about})})
            partial.rename(file)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise InvalidInput(f"cannot write the statistics {file}: {error}") from None

    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, of all numbers and of where they come from."""
        digest = hashlib.sha256(json.dumps([self.tokens, self.calibration, self.seed]).encode())
        for layer in self.layers:
            for tensor in vars(layer).values():
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    @classmethod
    def load(cls, file: Path) -> "Statistics":
        """Read what `save` wrote.

        Raises:
            InvalidInput: the file is missing, damaged or something else.
        """
        try:
            with safe_open(file, "pt") as stored:
                about = json.loads((stored.metadata() or {})["kvfold.statistics"])
                if about.pop("schema") != SCHEMA:
                    raise InvalidInput(f"{file} holds statistics of another kvfold; collect them again")
                names = [field.name for field in fields(LayerStatistics)]
                layers = tuple(
                    LayerStatistics(**{name: stored.get_tensor(f"{n}.{name}") for name in names})
                    for n in range(about.pop("layers"))
                )
                return cls(layers=layers, **about)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{file} holds no statistics that kvfold wrote ({type(error).__name__}: {error})") from None


def collect(
    model: Any,
    sequences: Tensor,
    *,
    projections: Callable[[int], Mapping[str, str]],
    batch_size: int,
    calibration: str,
    seed: int,
) -> Statistics:
    """Read sequences once and keep every layer's statistics.

    Under `torch.distributed` each rank reads its share, and all return the sums over ranks.

    Args:
        model: a transformers causal language model in eval mode and float32, with eager attention.
        sequences: token ids (sequences, T), int64.
        projections: a layer's projections by role, as `Family.projections` gives them.
        batch_size: sequences at once; a question of memory and speed alone.
        calibration: where the sequences come from, for the record.
        seed: of the labels.

    Raises:
        InvalidInput: the sequences are too few, too short or too long for the model, or a statistic is NaN or infinite.
    """
    check_length(model, sequences.shape[1])
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if len(sequences) < ranks:
        raise InvalidInput(
            f"{len(sequences)} calibration sequences are fewer than the {ranks} processes; take at least one each"
        )
    # All labels' random numbers first: neither the batch size nor the number of ranks changes who gets which.
    chance = torch.rand(sequences.shape, generator=torch.Generator().manual_seed(seed ^ _LABELS), dtype=torch.float64)
    batches = list(zip(sequences[rank::ranks].split(batch_size), chance[rank::ranks].split(batch_size), strict=True))
    layers = [_Sums() for _ in range(model.config.get_text_config().num_hidden_layers)]
    _assert_plain_head(model, sequences)
    with _watched(model, layers, projections):
        for ids_BT, chance_BT in progress(batches, "statistics", len(batches)):
            hidden_BTD = model.base_model(input_ids=ids_BT.to(model.device), use_cache=False).last_hidden_state
            hidden_BTD.backward(_score(model, hidden_BTD.detach(), chance_BT.to(model.device)))
            _check_finite(layers)
    for sums in layers:
        sums.over_ranks(model.device)
    means = tuple(sums.means(sequences.numel()) for sums in layers)
    return Statistics(layers=means, tokens=sequences.numel(), calibration=calibration, seed=seed)


@torch.no_grad()
def _score(model: Any, hidden_BTD: Tensor, chance_BT: Tensor) -> Tensor:
    """The gradient of the log likelihood of drawn labels at the last hidden states: (onehot - p) W_head."""
    head = model.get_output_embeddings()
    rows = max(1, _LOGITS // len(head.weight))
    scores = []
    for hidden_XD, chance_X in zip(hidden_BTD.flatten(0, 1).split(rows), chance_BT.flatten().split(rows), strict=True):
        p_XV = head(hidden_XD).softmax(-1)
        label_X1 = draw(p_XV, chance_X)[:, None]
        scores.append(p_XV.neg_().scatter_add_(1, label_X1, torch.ones_like(p_XV[:, :1])) @ head.weight)
    return torch.cat(scores).view_as(hidden_BTD)


@torch.no_grad()
def _assert_plain_head(model: Any, ids_BT: Tensor) -> None:
    """`_score` knows no scale, cap or shift between the head and the logits."""
    ids_BT = ids_BT[:1, :2].to(model.device)
    logits = model.get_output_embeddings()(model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state)
    assert torch.allclose(model(input_ids=ids_BT, use_cache=False).logits, logits, rtol=1e-3, equal_nan=True)


class _Sums(dict[str, Tensor]):
    """One layer's sums over tokens, float64, on the CPU: nothing here grows with them."""

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().to("cpu", torch.float64).contiguous()
        self[name] = self[name].add_(value) if name in self else value

    def see_input(self, x_BTD: Tensor) -> None:
        self.add("input_EE", _moment(pad(x_BTD.flatten(0, 1), (0, 1), value=1)))

    def see_queries(self, q_BTC: Tensor, width: int) -> None:
        self.add("query_NHH", _moment(q_BTC.flatten(0, 1).unflatten(1, (-1, width)).transpose(0, 1)))

    def see_attention(self, p_BNTT: Tensor) -> None:
        self.add("distance_NT", _by_distance((p_BNTT * (1 - p_BNTT)).sum(0)))

    def watch_gradient(self, name: str, output_BTC: Tensor) -> None:
        """Have the backward pass go through a projection's output and leave the moment of its gradient here."""
        output_BTC.requires_grad_()  # in the first layer nothing else makes the graph begin
        output_BTC.register_hook(lambda g_BTC: self.add(name, _moment(g_BTC.flatten(0, 1))))

    def over_ranks(self, device: torch.device) -> None:
        """Sum over the processes of a distributed run."""
        if dist.is_initialized():
            for name in sorted(self):
                on_device = self[name].to(device)
                dist.all_reduce(on_device)
                self[name] = on_device.cpu()

    def means(self, tokens: int) -> LayerStatistics:
        mass_NT = self["distance_NT"]
        # Attention that never hesitates has no such mass: then every distance is as good.
        mass_NT = torch.where(mass_NT.sum(-1, keepdim=True) > 0, mass_NT, 1)
        moments = {name: total / tokens for name, total in self.items() if name != "distance_NT"}
        return LayerStatistics(**moments, distance_NT=mass_NT / mass_NT.sum(-1, keepdim=True))


def _moment(rows_XE: Tensor) -> Tensor:
    """Σ x xᵀ over a batch's tokens: in float64 on the CPU, in float32 on an accelerator, where that is so much faster."""
    rows_XE = rows_XE.detach().to(torch.float64 if rows_XE.device.type == "cpu" else torch.float32)
    return rows_XE.mT @ rows_XE


def _by_distance(mass_NTT: Tensor) -> Tensor:
    """Sums (N, T) over the diagonals query - key = Δ of (N, query, key).

    Keys are reversed and rows made one element longer than they are read again: each row moves one to the right of the last.
    """
    heads, length, _ = mass_NTT.shape
    skewed = pad(mass_NTT.flip(-1), (0, length)).flatten(1)[:, : length * (2 * length - 1)]
    return skewed.view(heads, length, -1).sum(1, dtype=torch.float64)[:, length - 1 :]


@contextmanager
def _watched(model: Any, layers: list[_Sums], projections: Callable[[int], Mapping[str, str]]) -> Iterator[None]:
    """Hooks on every layer's projections and attention; no gradient is computed for a weight."""
    assert not model.training, "dropout would be part of the statistics"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as stack, torch.enable_grad():
        stack.callback(lambda: [parameter.requires_grad_(True) for parameter in trained])
        for parameter in trained:
            parameter.requires_grad_(False)
        for number, sums in enumerate(layers):
            for hook in _hook_layer(model, sums, projections(number)):
                stack.callback(hook.remove)
        yield


def _hook_layer(model: Any, sums: _Sums, names: Mapping[str, str]) -> Iterator[Any]:
    """Register a layer's hooks; yields their handles."""
    attention = model.get_submodule(names["q"].rpartition(".")[0])
    width = attention.head_dim

    def queries(module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        sums.see_input(arguments[0])
        sums.see_queries(output, width)

    def probabilities(module: Any, arguments: Any, output: tuple[Any, ...]) -> None:
        assert output[1] is not None, "attention probabilities are seen with attn_implementation='eager' only"
        sums.see_attention(output[1].detach())

    yield model.get_submodule(names["q"]).register_forward_hook(queries)
    yield attention.register_forward_hook(probabilities)
    for role, name in (("k", "key_fisher"), ("v", "value_fisher")):
        watch = partial(_watch, sums, name)
        yield model.get_submodule(names[role]).register_forward_hook(watch)


def _watch(sums: _Sums, name: str, module: Any, arguments: Any, output: Tensor) -> None:
    sums.watch_gradient(name, output)


def _check_finite(layers: list[_Sums]) -> None:
    """Name the layer where the trouble starts: activations pass it on to later layers, gradients to earlier ones."""
    forward = [(number, name) for number in range(len(layers)) for name in ("input_EE", "query_NHH", "distance_NT")]
    backward = [(number, name) for number in reversed(range(len(layers))) for name in ("key_fisher", "value_fisher")]
    for number, name in forward + backward:
        if not layers[number][name].isfinite().all():
            raise InvalidInput(
                f"layer {number} of the source gives statistics that are NaN or infinite ({name}); "
                "check its weights, or fold with --calibration none"
            )
