"""Layer by layer gives the same statistics and the same text as the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.forward import query_input
from kvfold.convert.calibration import capacity, layerwise, passes
from kvfold.convert.calibration import study as study_module
from kvfold.convert.calibration.capacity import Need
from kvfold.convert.calibration.self_text import sample_from
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import layout_of, study
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.source import Source, open_source
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load_model
from kvfold.models.layered_model import LayeredModel

from ...support.tiny import make

SETTINGS: dict[str, Any] = {"batch_size": 4, "calibration": "test", "seed": 3}
IDS = torch.randint(97, (6, 16), generator=torch.Generator().manual_seed(0))
TEXT: dict[str, Any] = {"sequences": 3, "length": 8, "bos": 1, "seed": 7, "batch_size": 3}
# A quarter of a head rotates: heads wide enough to have one.
WIDE: dict[str, dict[str, Any]] = {
    family: {"num_attention_heads": 4, "num_key_value_heads": 4} for family in ("stablelm", "gpt_neox")
}
WIDE["gemma4_text"] = {"hidden_size_per_layer_input": 0}  # each layer's own embeddings are not streamed
# In addition to every family: shards, another dtype, a tied head, a rotary table of its own, a window.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, WIDE.get(family, {})) for family in FAMILIES},
    "llama, tied shards": (
        "llama",
        {"tie_word_embeddings": True, "shard_size": "20KB", "dtype": torch.bfloat16, "rope": "llama3"},
    ),
    "mistral, window": ("mistral", {"sliding_window": 5, "num_key_value_heads": 2}),
}


def assert_equal(one: Statistics, other: Statistics) -> None:
    for number, (mine, theirs) in enumerate(zip(one.layers, other.layers, strict=True)):
        for name, tensor in vars(mine).items():
            theirs_too = getattr(theirs, name)
            # Where tensors lie in memory may decide how a sum is rounded; samples are kept in bfloat16.
            atol = (1e-6 if tensor.dtype == torch.float64 else 2**-8) * theirs_too.abs().max().item()
            torch.testing.assert_close(tensor, theirs_too, rtol=0, atol=atol, msg=f"layer {number}, {name}")


def check_layout(source: Source, found: Statistics) -> None:
    """Quantities that hooks see are in the layout of `Source.attention`: W_Q C W_Qᵀ is E[q qᵀ], whatever is fused."""
    statistics, keys = found.layers[-1], source.shape(source.attending[-1]).geometry.key_width
    assert statistics.key_fisher.shape == statistics.value_fisher.shape == (keys, keys)
    if source.family.latent:  # whose latent has the gradient of keys and values
        assert torch.equal(statistics.key_fisher, statistics.value_fisher)
        latent = source.latent_attention(source.layers - 1)
        inputs_XA = query_input(latent, statistics.input_BTD.double()).flatten(0, 1)
        q_nope_NXP = inputs_XA @ latent.q_nope_NPA.mT
        given, wanted = statistics.query_NHH, q_nope_NXP.mT @ q_nope_NXP / len(inputs_XA)
        width = wanted.shape[-1]
        torch.testing.assert_close(
            given[:, :width, :width], wanted, rtol=0, atol=2**-6 * wanted.abs().max().item()
        )
        return
    attention = source.attention(source.layers - 1)
    bias_NH = torch.zeros(attention.q_NHD.shape[:2]) if attention.q_NH is None else attention.q_NH
    q_NHE = torch.cat([attention.q_NHD, bias_NH[..., None]], -1)
    wanted_NHH = q_NHE @ statistics.input_EE @ q_NHE.mT
    atol = 1e-5 * wanted_NHH.abs().max().item()
    torch.testing.assert_close(statistics.query_NHH, wanted_NHH, rtol=0, atol=atol)
    assert attention.k_KHD[..., 0].numel() == keys


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_whole_model(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    directory = make(tmp_path / "source", family, **overrides)
    source, whole = open_source(directory), load_model(directory)
    (tmp_path / "work").mkdir()
    parts = LayeredModel(source.checkpoint)
    mine = layerwise.collect(parts, IDS, layout=layout_of(source), **SETTINGS, work=tmp_path / "work")
    found = passes.collect(whole, IDS, layout=layout_of(source), **SETTINGS)
    assert_equal(mine, found)
    if variant in FAMILIES:
        check_layout(source, found)
    with parts.streamed(1) as model:
        assert torch.equal(sample_from(model, **TEXT), sample_from(whole, **TEXT))
    assert all(parameter.is_meta for parameter in parts.model.parameters()), "weights stay in memory"
    assert not list((tmp_path / "work").iterdir())


def in_memory(block: torch.nn.Module) -> bool:
    return not any(weight.is_meta for weight in block.parameters())


def test_only_one_layer_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(make(tmp_path / "source", num_hidden_layers=4))
    parts, most = LayeredModel(source.checkpoint), 0
    load = LayeredModel.load

    def counted(self: LayeredModel, number: int) -> None:
        nonlocal most
        load(self, number)
        most = max(most, sum(map(in_memory, self.blocks)))

    monkeypatch.setattr(LayeredModel, "load", counted)
    layerwise.collect(parts, IDS, layout=layout_of(source), **SETTINGS, work=tmp_path)
    assert most == 1
    with parts.streamed(2) as model:
        sample_from(model, **TEXT)
        assert list(map(in_memory, parts.blocks)) == [True, True, False, False]
    assert most == 3


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is infinite, a disk that is too small: a sentence, and nothing is left."""
    directory = make(tmp_path / "source")
    source, work = open_source(directory), tmp_path / "work"
    work.mkdir()
    settings = {"layout": layout_of(source), **SETTINGS, "work": work}
    with monkeypatch.context() as patch:
        patch.setattr(layerwise.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
        with pytest.raises(InvalidInput, match="bytes on disk"):
            layerwise.collect(LayeredModel(source.checkpoint), IDS, **settings)
    parts = LayeredModel(source.checkpoint)
    load = parts.load

    def broken(number: int) -> None:
        load(number)
        parts.blocks[number].mlp.down_proj.weight[0, 0] = torch.inf if number else 0

    monkeypatch.setattr(parts, "load", broken)
    with pytest.raises(InvalidInput, match="layer 1 of the source"):
        layerwise.collect(parts, IDS, **settings)
    assert not list(work.iterdir())
    assert all(parameter.is_meta for parameter in parts.model.parameters())


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the mode that each study took."""
    seen: list[str] = []
    whole, by_layer = passes.collect, layerwise.collect
    for module, name, collect in ((passes, "whole", whole), (layerwise, "layerwise", by_layer)):

        def seeing(*given: Any, name: str = name, collect: Any = collect, **named: Any) -> Statistics:
            seen.append(name)
            return collect(*given, **named)

        monkeypatch.setattr(module, "collect", seeing)
    return seen


def test_chosen_by_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Too little memory for the whole model: layer by layer, with the same result."""
    source, text = open_source(make(tmp_path / "source")), {"sequences": 4, "length": 8, "seed": 0}
    need = Need.of(source, sequences=4, length=8)
    assert need.weights == sum(4 * source.checkpoint[name].numel() for name in source.checkpoint)
    assert need.layer * 2 + need.rest == need.weights
    fits = study(source, "self", **text, work=tmp_path)
    for module in (study_module, capacity):
        monkeypatch.setattr(module, "free_bytes", lambda: need.rest + need.layer + 2 * need.cached)
    smaller = study(source, "self", **text, work=tmp_path / "not" / "there")
    assert "larger than memory" in caplog.text
    forced = study(source, "self", **text, layerwise=False)
    assert modes == ["whole", "layerwise", "whole"]
    assert fits is not None
    assert smaller is not None
    assert forced is not None
    assert_equal(fits, smaller)
    assert_equal(fits, forced)


def test_fewer_rows_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: list[str]) -> None:
    """Where the whole model fits next to the activations of half a batch, half a batch is read at once."""
    source, text = open_source(make(tmp_path / "source")), {"sequences": 4, "length": 64, "seed": 0}
    usual = study(source, "self", **text, work=tmp_path)
    read, score = list[int](), passes.score

    def counted(model: Any, hidden_BTD: Tensor, chance_BT: Tensor) -> Tensor:
        read.append(len(hidden_BTD))
        return score(model, hidden_BTD, chance_BT)

    monkeypatch.setattr(passes, "score", counted)
    half = Need.of(source, sequences=2, length=64)
    monkeypatch.setattr(capacity, "device", lambda: torch.device("cuda"))
    for module, name in ((study_module, "free_bytes"), (capacity, "gpu_bytes")):
        monkeypatch.setattr(module, name, lambda: half.whole)
    halved = study(source, "self", **text, work=tmp_path)
    assert modes == ["whole", "whole"]
    assert read == [2, 2]
    assert usual is not None
    assert halved is not None
    assert_equal(usual, halved)
    for module, name in ((study_module, "free_bytes"), (capacity, "gpu_bytes")):
        monkeypatch.setattr(module, name, lambda: half.by_layer)
    study(source, "self", **text, work=tmp_path)
    assert modes[2:] == ["layerwise"]


def test_one_process_without_room_decides_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: list[str]
) -> None:
    """Of two processes of a launch, the other one's memory is too small for the whole model."""
    source = open_source(make(tmp_path / "source"))
    monkeypatch.setattr(study_module, "from_every", lambda own: [own, True])
    study(source, "self", sequences=4, length=8, seed=0, work=tmp_path)
    assert modes == ["layerwise"]


def test_activations_are_counted(tmp_path: Path) -> None:
    """The estimate of what autograd keeps, against what it does keep, for a layer of ordinary proportions."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    widths = {"hidden_size": 64, "intermediate_size": 176, **heads}
    source = open_source(make(tmp_path, **widths))
    model, kept = load_model(tmp_path).requires_grad_(False), dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(97, (2, 48), generator=torch.Generator().manual_seed(0))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    embedded_BTD = model.get_input_embeddings()(ids).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_BTD = model.get_decoder()(inputs_embeds=embedded_BTD, use_cache=False).last_hidden_state
    saved = sum(size for storage, size in kept.items() if storage not in own)
    assert hidden_BTD.requires_grad
    assert 0.75 * saved < Need.of(source, sequences=2, length=48).activations < 2 * saved
