"""Statistics are what their definitions say, on models small enough to compute each in the plainest way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.convert.calibration import passes
from kvfold.convert.calibration.moments import BLOCKS, MOMENTS, SAMPLES, Layout
from kvfold.convert.calibration.passes import collect
from kvfold.convert.calibration.self_text import BLOCK, draw, sample_from
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.families.rows import FAMILIES
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load_model

from ...support.tiny import make

PROJECTIONS = FAMILIES["llama"].projections
LAYOUT = Layout(
    projections=PROJECTIONS,
    split=lambda layer, role, output: {role: output.unflatten(-1, (-1, 8))},
    layers=(0, 1),
)
SETTINGS: dict[str, Any] = {"layout": LAYOUT, "calibration": "test", "seed": 3}
WIDTHS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A grouped-query model, without biases and with; float64, so that sums agree to the last digits."""
    return load_model(make(tmp_path_factory.mktemp("tiny"), request.param, **WIDTHS)).double()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(97, (6, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def stats(model: Any, ids: Tensor) -> Statistics:
    return collect(model, ids, batch_size=4, **SETTINGS)


def outputs(model: Any, ids: Tensor, role: str, layer: int = 1) -> tuple[Tensor, Tensor, Any]:
    """Input and output of one projection, by hooks that keep everything, and the model's own output."""
    seen: list[Tensor] = []
    module = model.get_submodule(PROJECTIONS(layer)[role])
    with module.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output])):
        result = model(input_ids=ids, use_cache=False, output_attentions=True, output_hidden_states=True)
    return seen[0], seen[1], result


def test_moments(model: Any, ids: Tensor, stats: Statistics) -> None:
    """C of the normed hidden states with a constant 1; E[q qᵀ] from W_Q, bias included."""
    with torch.no_grad():
        _, q, result = outputs(model, ids, "q")
        block = model.get_submodule("model.layers.1")
        x = block.input_layernorm(result.hidden_states[1]).flatten(0, 1)
        direct_q = block.self_attn.q_proj(x)
    assert torch.equal(q.flatten(0, 1), direct_q)
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    torch.testing.assert_close(stats.layers[1].input_EE, x.T @ x / len(x))
    assert stats.layers[1].input_EE[-1, -1] == 1
    heads = direct_q.view(-1, 4, direct_q.shape[1] // 4)
    torch.testing.assert_close(
        stats.layers[1].query_NHH, torch.einsum("xnh,xng->nhg", heads, heads) / len(heads)
    )


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_fisher_by_hand(
    model: Any, ids: Tensor, stats: Statistics, role: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence at a time: autograd through log softmax at the labels that `collect` drew."""
    labels: list[Tensor] = []

    def spy(p: Tensor, chance: Tensor) -> Tensor:
        labels.append(draw(p, chance))
        return labels[-1]

    monkeypatch.setattr(passes, "draw", spy)
    collect(model, ids, batch_size=4, **SETTINGS)
    drawn = torch.cat(labels).view_as(ids)
    total: Tensor | float = 0.0
    for sequence, label in zip(ids, drawn, strict=True):
        _, output, result = outputs(model, sequence[None], role, layer)
        likelihood = result.logits[0].log_softmax(-1).gather(1, label[:, None]).sum()
        (g,) = torch.autograd.grad(likelihood, output)
        total = total + g[0].T @ g[0]
    taken = stats.layers[layer]
    fisher = (
        taken.query_fisher if role == "q" else getattr(taken, {"k": "key", "v": "value"}[role] + "_fisher")
    )
    if role == "q":
        fisher = torch.block_diag(*fisher)
    if role == "q":  # of each head alone
        total = total * torch.block_diag(*torch.ones_like(taken.query_fisher))
    torch.testing.assert_close(fisher, total / ids.numel(), rtol=1e-6, atol=1e-9 * fisher.max().item())


@pytest.mark.parametrize("role", ["k", "v"])
def test_fisher_predicts_kl(model: Any, role: str) -> None:
    """Independent noise of covariance S at every token's keys costs ½ tr(G S) nats a token."""
    ids = torch.randint(97, (256, 8), generator=torch.Generator().manual_seed(1))
    layer = collect(model, ids, batch_size=64, **SETTINGS).layers[1]
    fisher = layer.key_fisher if role == "k" else layer.value_fisher
    generator = torch.Generator().manual_seed(2)
    # S = half halfᵀ, rank 3.
    half = torch.randn(len(fisher), 3, generator=generator, dtype=torch.float64) * 1e-2
    module = model.get_submodule(PROJECTIONS(1)[role])

    def disturb(_: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + torch.randn(*output.shape[:2], 3, generator=generator, dtype=torch.float64) @ half.T

    with torch.no_grad():
        source = model(input_ids=ids).logits.log_softmax(-1)
        with module.register_forward_hook(disturb):
            disturbed = [model(input_ids=ids).logits.log_softmax(-1) for _ in range(4)]
    measured = torch.stack([(source.exp() * (source - other)).sum(-1).mean() for other in disturbed]).mean()
    predicted = 0.5 * torch.trace(half.T @ fisher @ half)
    assert predicted.item() == pytest.approx(measured.item(), rel=0.15)


def test_distances(model: Any, ids: Tensor, stats: Statistics) -> None:
    with torch.no_grad():
        p = outputs(model, ids, "q")[2].attentions[1].double()
    direct = torch.zeros(4, 16, dtype=torch.float64)
    for query in range(16):
        for key in range(query + 1):
            direct[:, query - key] += (p * (1 - p))[:, :, query, key].sum(0)
    wanted_NT = direct / direct.sum(1, keepdim=True)
    torch.testing.assert_close(stats.layers[1].distance_NT, wanted_NT, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(stats.layers[1].distance_NT.sum(1), torch.ones(4, dtype=torch.float64))


def test_the_part_of_first_tokens(model: Any, ids: Tensor, stats: Statistics) -> None:
    with torch.no_grad():
        p = outputs(model, ids, "q")[2].attentions[1].double()
    mass_NT = (p * (1 - p))[..., 0].sum(0) / (p * (1 - p)).sum((0, 2, 3))[:, None]
    layer = stats.layers[1]
    torch.testing.assert_close(layer.first_NT, mass_NT, rtol=1e-5, atol=1e-9)
    assert bool((layer.first_NT <= layer.distance_NT + 1e-9).all())
    # Of sequences that end with their first token, it is all there is.
    short = collect(model, ids[:, :2], batch_size=4, **SETTINGS).layers[1]
    for name in ("key_fisher", "value_fisher"):
        first, whole = getattr(short, f"first_{name}"), getattr(short, name)
        assert bool((torch.linalg.eigvalsh(whole - first) > -1e-9 * whole.trace()).all())
        assert 0 < float(first.trace()) < float(whole.trace())


@pytest.mark.parametrize("name", ["first_key_fisher", "first_NT", "input_EE", "output_BTD", "ids_BT"])
def test_a_damaged_tensor_is_named(tmp_path: Path, stats: Statistics, name: str) -> None:
    is_ids = name == "ids_BT"
    whole = stats.ids_BT if is_ids else getattr(stats.layers[1], name)
    for number, tensor in enumerate((whole[1:], whole.float(), whole.flatten(), whole - torch.inf)):
        layers = (stats.layers[0], replace(stats.layers[1], **{name: tensor})) if not is_ids else stats.layers
        file = tmp_path / f"{number}.safetensors"
        replace(stats, layers=layers, ids_BT=tensor if is_ids else stats.ids_BT).save(file)
        with pytest.raises(InvalidInput, match=name if is_ids else rf"1\.{name}"):
            Statistics.load(file)


@pytest.mark.parametrize("batch_size", [1, 6])
def test_batch_size_changes_nothing(model: Any, ids: Tensor, stats: Statistics, batch_size: int) -> None:
    assert_same(collect(model, ids, batch_size=batch_size, **SETTINGS), stats)


def assert_same(one: Statistics, other: Statistics) -> None:
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name, tensor in vars(mine).items():
            expected = getattr(theirs, name)
            atol = 1e-10 * expected.abs().max().item()
            torch.testing.assert_close(tensor, expected, rtol=0, atol=atol, msg=name)


def test_few_logits(model: Any, ids: Tensor, stats: Statistics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_LOGITS", 97 * 5)
    assert_same(collect(model, ids, batch_size=4, **SETTINGS), stats)


def test_model_is_left_as_it_was(model: Any, ids: Tensor) -> None:
    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    before = hooks()
    collect(model, ids, batch_size=6, **SETTINGS)
    assert hooks() == before
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_save_and_load(stats: Statistics, tmp_path: Path) -> None:
    stats = replace(stats, reach=16)
    stats.save(tmp_path / "one")
    stats.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    loaded = Statistics.load(tmp_path / "one")
    assert (loaded.tokens, loaded.calibration, loaded.seed, loaded.reach) == (96, "test", 3, 16)
    for mine, theirs in zip(stats.layers, loaded.layers, strict=True):
        for name, tensor in vars(mine).items():
            assert torch.equal(tensor, getattr(theirs, name))
            wanted = torch.bfloat16 if name in SAMPLES else torch.float64
            assert tensor.dtype == getattr(theirs, name).dtype == wanted
    assert loaded.fingerprint() == stats.fingerprint() != replace(stats, seed=4).fingerprint()
    with pytest.raises(InvalidInput, match="nothing is overwritten"):
        stats.save(tmp_path / "one")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def test_file_that_is_none(stats: Statistics, tmp_path: Path) -> None:
    stats.save(tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    (tmp_path / "text").write_text("not statistics")
    model = make(tmp_path / "model") / "model.safetensors"
    for file in (tmp_path / "cut", tmp_path / "text", tmp_path / "absent", model):
        with pytest.raises(InvalidInput, match="holds no statistics"):
            Statistics.load(file)


def test_non_finite(tmp_path: Path, ids: Tensor) -> None:
    model = load_model(make(tmp_path, **WIDTHS))
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(InvalidInput, match="layer 1 of the source"):
        collect(model, ids, batch_size=4, **SETTINGS)
    with pytest.raises(InvalidInput, match="predicts NaN"):
        sample_from(model, sequences=1, length=4, bos=1, seed=0, batch_size=1)


def test_lengths(model: Any, ids: Tensor) -> None:
    for length in (1, 513):
        with pytest.raises(InvalidInput, match="between 2 and 512"):
            collect(model, torch.zeros(2, length, dtype=torch.int64), batch_size=1, **SETTINGS)


def test_sampling(model: Any) -> None:
    """The same text for any batch size; every token from the model's own distribution without a cache."""
    settings: dict[str, Any] = {"sequences": 5, "length": 12, "bos": 1, "seed": 7}
    text = sample_from(model, batch_size=5, **settings)
    assert text.shape == (5, 12)
    assert text.dtype == torch.int64
    assert (text[:, 0] == 1).all()
    assert torch.equal(text, sample_from(model, batch_size=2, **settings))
    assert not torch.equal(text, sample_from(model, batch_size=5, **{**settings, "seed": 8}))
    chance = torch.rand(5, 12, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        p = model(input_ids=text).logits[:, :-1].softmax(-1)
    assert torch.equal(text[:, 1:], draw(p.flatten(0, 1), chance[:, 1:].flatten()).view(5, 11))
    assert sample_from(model, batch_size=5, **{**settings, "bos": None}).unique(dim=0).shape[0] == 5


def test_draw() -> None:
    """Frequencies are the probabilities; what has none is never drawn, at either end of the interval."""
    p = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    chance = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    counts = draw(p.expand(1000, -1), chance).bincount(minlength=6)
    assert (counts - 1000 * p).abs().max() <= 1
    assert counts[[0, 2, 5]].sum() == 0


@pytest.mark.parametrize("vocabulary", [BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 5])
def test_draw_by_blocks(vocabulary: int) -> None:
    """A large vocabulary is drawn from in two steps, which together are the inverse of one distribution."""
    p = (3 * torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(0))).softmax(-1)
    p[:, ::3] = 0
    chance = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chance[0], chance[1] = 0, 1 - 2**-53
    below = p.double().cumsum(-1)
    assert torch.equal(
        draw(p, chance), torch.searchsorted(below, chance[:, None] * below[:, -1:], right=True).squeeze(1)
    )
    assert (p[torch.arange(200), draw(p, chance)] > 0).all()


def test_moment_of_any_width() -> None:
    """The blocks that are computed and those that mirror them are the whole product."""
    for width in (1, 5, BLOCKS, 3 * BLOCKS + 1):
        rows = torch.randn(7, 1, 1, width, generator=torch.Generator().manual_seed(width))
        whole = rows.double().flatten(1).mT @ rows.double().flatten(1)
        torch.testing.assert_close(MOMENTS["value_fisher"].reduce(rows), whole)
