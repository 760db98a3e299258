"""The suite `cache`: the size of a token in the KV cache, by config.json and in the running model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.cost_blocks import CacheAtLength, CacheBlock, ModelCache
from ...checkpoints.directory import read_config
from ...convert.families.layers.layer_shapes import own_geometry
from ...convert.families.recognition import attending, complete, configured, geometry_of, is_multimodal
from ...convert.families.rows import FAMILIES
from ...convert.towers.tower import text_config
from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.units import show_bytes
from ...models.caches import cache_of
from ...models.causal_lm import Loaded
from ..subject import Subject
from .catalogue import CacheSettings

CONTEXTS = (4_096, 32_768, 131_072)
_DIGITS = 3  # of a position, which attention_kvfold.py caches with rotation intact
_TOKENS = 64  # read to measure the growth of the cache


@dataclass(frozen=True)
class CacheSize:
    """The growth of the live cache from one token to the next, one sequence.

    Attributes:
        elements_per_token_per_layer: mean over the layers whose cache grows.
        elements_per_token: all layers.
        bytes_per_token: all layers, in `dtype`.
        dtype: dtype of the cache, as the model was loaded (a CPU run loads float32 by default).
        lengths: the two sequence lengths whose difference was taken, so that constant parts cancel.
        layers: for each layer its elements per token and the most tokens that it keeps, None for all.
        quantised: for each layer its bytes per token in the number format of `--cache-dtype`; None without.
        state_bytes: of layers that do not attend, whose state has one size, as the model was loaded.
    """

    elements_per_token_per_layer: float
    elements_per_token: float
    bytes_per_token: float
    dtype: str
    lengths: tuple[int, int]
    layers: tuple[tuple[float, int | None], ...]
    quantised: tuple[float, ...] | None = None
    state_bytes: int = 0

    def bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of a sequence's cache, of `itemsize` bytes a number where it is not quantised."""
        if self.quantised is None:
            return round(self.elements(tokens) * itemsize)
        kept = (min(tokens, most or tokens) for _, most in self.layers)
        return round(sum(each * count for each, count in zip(self.quantised, kept, strict=True)))

    @property
    def growing(self) -> int:
        """Return the number of layers whose cache grows."""
        return sum(each > 0 for each, _ in self.layers)

    def elements(self, tokens: int) -> float:
        """Return the elements of a sequence's cache; a sliding window limits a layer's."""
        return sum(each * min(tokens, most or tokens) for each, most in self.layers)


def rows(found: CacheBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    models: list[ModelCache] = [getattr(found, role) for role in roles]
    student, stored, kind = found.student, found.student.stored_dtype, found.student.cache_dtype
    lines = [
        ["cache, elements/token/layer", *(_number(model.elements_per_token_per_layer) for model in models)],
        ["  by config.json", *(_number(model.predicted_elements_per_token_per_layer) for model in models)],
        ["cache, elements/token", *(_number(model.elements_per_token) for model in models)],
        [f"cache, bytes/token ({student.dtype})", *(_number(model.bytes_per_token) for model in models)],
    ]
    if student.quantised_bytes_per_token is not None:
        label = f"cache, bytes/token ({kind} and its scales)"
        lines.append([label, _number(student.quantised_bytes_per_token)])
    if kind is not None:
        stored = f"{kind}; of the others {stored}" if models[1:] else kind
    for number, context in enumerate(student.contexts):
        sizes = [model.contexts[number] for model in models]
        label = f"cache of {context.tokens // 1024}k tokens ({stored})"
        lines.append([label, *(show_bytes(size.bytes) for size in sizes)])
        if found.memory is not None:
            label = f"  sequences in {show_bytes(found.memory)}"
            lines.append([label, *(str(size.largest_batch) for size in sizes)])
    if any(model.state_bytes for model in models):
        states = ((show_bytes(model.state_bytes or 0), model.growing_layers) for model in models)
        shown = (f"{size}, {growing} layers grow" for size, growing in states)
        lines.append(["state of layers without attention", *shown])
    if found.ratio is not None:
        lines.append(["cache, share of the teacher's", f"{found.ratio:.2%}"])
    return lines


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.10g}"


def measure(subject: Subject) -> CacheBlock:
    """Run each model on a few tokens and measure its cache."""
    memory = subject.asked(CacheSettings).memory
    models = {}
    for role in subject.roles:
        found = subject.part(f"cache/{role}", partial(_count, subject, role))
        models[role] = _model(subject, role, CacheSize(**found), memory)
    student, teacher = models["student"], models.get("teacher")
    ratio = student.elements_per_token / teacher.elements_per_token if teacher else None
    return CacheBlock(student, teacher, models.get("parent"), ratio, memory)


@torch.inference_mode()
def count(loaded: Loaded) -> CacheSize:
    """Measure the growth of the cache between a sequence and one of twice its length."""
    window = getattr(loaded.model.config.get_text_config(), "sliding_window", None)
    tokens = min(_TOKENS, loaded.positions or _TOKENS, *([max(2, int(window) - 1)] if window else []))
    lengths = (tokens // 2, tokens)
    ids_W = torch.arange(tokens) % loaded.vocabulary
    (short, _), (long, state_bytes) = (_layers(loaded, ids_W[:length]) for length in lengths)
    grown = lengths[1] - lengths[0]
    growth, bytes_grown, kinds = [], 0, set[torch.dtype]()
    for (before, _), (after, most) in zip(short, long, strict=True):
        elements = sum(each.numel() for each in after) - sum(each.numel() for each in before)
        growth.append((elements / grown, most))
        bytes_grown += sum(each.nbytes for each in after) - sum(each.nbytes for each in before)
        kinds |= {each.dtype for each in after if each.is_floating_point()}
    elements_per_token = sum(each for each, _ in growth)
    return CacheSize(
        elements_per_token_per_layer=elements_per_token / max(1, sum(each > 0 for each, _ in growth)),
        elements_per_token=elements_per_token,
        bytes_per_token=bytes_grown / grown,
        dtype="+".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)),
        lengths=lengths,
        layers=tuple(growth),
        state_bytes=state_bytes,
    )


def predicted(config: Mapping[str, Any]) -> float | None:
    """Return the elements per token and layer by config.json; None for a class that kvfold does not know.

    Where layers are unlike, it is the mean of those with a cache.

    Latent attention caches its latent and, where it has one, a rotary key (arXiv 2405.04434, section 2.1).
    With rotation intact it also caches positions. Every other attention caches the keys and values of each
    key/value head.
    """
    if (latent := config.get("kv_lora_rank", config.get("latent_rank"))) is not None:
        elements = int(latent) + int(config.get("qk_rope_head_dim") or 0)
        digits, layers = _digits(config)
        return (elements * layers + digits) / layers if digits else elements
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        return None
    try:
        whole = complete(FAMILIES[kind], config)
        family = configured(FAMILIES[kind], whole)
        geometry = geometry_of(whole)
        if not family.unlike:
            return geometry.cache_elements
        sizes = [
            own_geometry(family, whole, geometry, layer).cache_elements for layer in attending(family, whole)
        ]
        return sum(sizes) / len(sizes)
    except InvalidInput:  # a shape that kvfold cannot fold
        return None


def _digits(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the digits of a token's position that all layers cache, and the number of layers that attend.

    With rotation intact, the first of each kind of layer caches them.
    """
    ours = config.get("kvfold")
    kind = str(ours.get("source_model_type")) if isinstance(ours, dict) else ""
    if not isinstance(ours, dict) or ours.get("form") != "intact" or kind not in FAMILIES:
        return 0, 1
    whole = complete(FAMILIES[kind], {**config, "model_type": kind})
    layers = ours.get("layers") or range(whole["num_hidden_layers"])
    kinds = whole.get("layer_types") or [None] * whole["num_hidden_layers"]
    return _DIGITS * len({kinds[layer] for layer in layers}), len(layers)


def _count(subject: Subject, role: str) -> dict[str, Any]:
    size = count(subject.load(role))
    if role == "student" and subject.stored is not None:
        layers = tuple(each or 0.0 for each in subject.stored.bytes_per_token)
        written = [each > 0 for each in layers]
        assert written == [each > 0 for each, _ in size.layers], "a layer that attends wrote no cache"
        size = replace(size, quantised=layers)
    return asdict(size)


def _model(subject: Subject, role: str, size: CacheSize, memory: int | None) -> ModelCache:
    path = subject.paths[role]
    config = read_config(path)
    stored = subject.stored_dtype(role)
    itemsize = getattr(torch, stored).itemsize
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    contexts = []
    for tokens in CONTEXTS:
        each = size.bytes(tokens, itemsize) + size.state_bytes
        contexts.append(
            CacheAtLength(tokens, each, None if memory is None else max(0, memory - weights) // each)
        )
    expected = predicted(text_config(path) if is_multimodal(config) else config)
    if expected is not None and expected != size.elements_per_token_per_layer:
        notice(
            f"the cache of {path} holds {size.elements_per_token_per_layer:g} elements per token and layer "
            f"in transformers, but {expected:g} by its config.json"
        )
    return ModelCache(
        elements_per_token_per_layer=size.elements_per_token_per_layer,
        predicted_elements_per_token_per_layer=expected,
        elements_per_token=size.elements_per_token,
        bytes_per_token=size.bytes_per_token,
        dtype=size.dtype,
        predicted_bytes_per_token=None if expected is None else round(expected * size.growing * itemsize),
        stored_dtype=stored,
        weight_bytes=weights,
        contexts=tuple(contexts),
        cache_dtype=None if size.quantised is None else subject.options.cache_dtype,
        quantised_bytes_per_token=None if size.quantised is None else sum(size.quantised),
        state_bytes=size.state_bytes,
        growing_layers=size.growing,
    )


def _layers(loaded: Loaded, ids_W: Tensor) -> tuple[list[tuple[list[Tensor], int | None]], int]:
    """Read W tokens; return each layer's cached tensors and the most tokens that it keeps (None: all).

    The second value is the number of bytes that layers without attention keep.
    """
    ids_1W = ids_W[None].to(loaded.device)
    cache = cache_of(loaded.model.base_model(input_ids=ids_1W, use_cache=True))
    layers = cache.layers
    states = [getattr(layer, name, ()) for layer in layers for name in ("conv_states", "recurrent_states")]
    states.append(getattr(cache, "linear_cache", ()))
    found = (part for state in states for part in (state.values() if isinstance(state, dict) else state))
    state_bytes = sum(part.nbytes for part in found if isinstance(part, Tensor))
    kept = []
    for layer in layers:
        named = vars(layer).items()  # names with an underscore are scratch
        tensors = [value for name, value in named if isinstance(value, Tensor) and not name.startswith("_")]
        # transformers keeps one token less than the sliding window: the next token is the query itself.
        window = getattr(layer, "sliding_window", None)
        kept.append((tensors, None if window is None else max(1, int(window) - 1)))
    return kept, state_bytes
