"""`forward.attend` is what transformers' own attention modules compute, of sources and of folds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra import forward
from kvfold.convert.algebra.attention import LatentAttention
from kvfold.convert.algebra.forward import Scoring, attend
from kvfold.convert.families.source import Source, open_source
from kvfold.convert.layer.fold import fold_attention
from kvfold.convert.methods.slots import slots_of
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.errors import InvalidInput
from kvfold.models.remote_code import is_remote
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.tiny import ROPE, make

# Norms of heads, of all heads together, of each head by its own weight, of weights 1 + w; bounded scores; sinks; windows, on one layer of two
# or on all; a factor on cosines and sines, of a whole head or of half of one.
SOURCES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "olmo2": {},
    "olmo3": {},
    "cohere": {"attention_bias": True},
    "stablelm": {
        "num_attention_heads": 4,
        "rope_parameters": {**ROPE["yarn"], "partial_rotary_factor": 0.25},
    },
    "gemma3_text": {},
    "gemma2": {},
    "gpt_oss": {"rope": "yarn"},
    "mixtral": {},
    "phi": {"rope_parameters": {**ROPE["yarn"], "partial_rotary_factor": 0.5}},
}


def seen(directory: Path, source: Source) -> list[tuple[Tensor, Tensor]]:
    """Return input and output (B, T, D) of every layer's attention in transformers, for T above the windows."""
    from transformers import AutoModelForCausalLM

    auto = KvfoldForCausalLM if is_remote(directory) else AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    found: dict[int, list[Tensor]] = {}
    for layer in range(source.layers):
        place = source.family.projections(layer)["o"].rpartition(".")[0]
        found[layer] = taken = []

        def read(_: Any, args: Any, kwargs: Any, output: Any, taken: list[Tensor] = taken) -> None:
            taken.extend((args[0] if args else kwargs["hidden_states"], output[0]))

        model.get_submodule(place).register_forward_hook(read, with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0)))
    return [(found[layer][0], found[layer][1]) for layer in range(source.layers)]


def check_equal(given: Tensor, wanted: Tensor) -> None:
    assert (given - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.fixture(scope="module", params=SOURCES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"num_key_value_heads": 4, **SOURCES[request.param]}
    return make(tmp_path_factory.mktemp("forward") / "source", request.param, **settings)


@pytest.mark.parametrize(
    ("to", "sizes"), [("gqa", {"kv_heads": 2}), ("mla", {"kv_budget": "50%", "container": "remote"})]
)
def test_a_fold_is_transformers(made: Path, tmp_path: Path, to: str, sizes: dict[str, Any]) -> None:
    plan = make_plan(made, fold_request({"model": str(made), "to": to, "refine": 0, **sizes}))
    rewrite(plan, tmp_path / "out")
    for layer, (input_BTD, output_BTD) in enumerate(seen(tmp_path / "out", plan.source)):
        folded, _ = fold_attention(plan, layer)
        table_F, factor = plan.source.frequencies(layer)
        slots_S = slots_of(plan.source, plan.bands, layer)
        turning = slots_S if isinstance(folded, LatentAttention) else table_F
        scoring = plan.source.scoring(layer, factor if to == "gqa" else 1.0).to(torch.float32)
        check_equal(attend(folded.to(torch.float32), input_BTD, turning, scoring), output_BTD)


def test_what_is_normed_has_no_length(tmp_path: Path) -> None:
    """Gradients through the norms: along a query's own direction there is none, but for the epsilon."""
    source = open_source(make(tmp_path / "source", "qwen3"))
    a = source.attention(0)
    size = torch.ones((), dtype=torch.float64, requires_grad=True)
    x_BTD = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rows in ("q_NHD", "k_KHD", "v_KHD"):
        scaled = {**vars(a), rows: size * getattr(a, rows)}
        loss = attend(type(a)(**scaled), x_BTD, source.frequencies(0)[0], source.scoring(0)).square().sum()
        (slope,) = torch.autograd.grad(loss, size)
        assert bool(slope.abs() < 1e-4 * loss) == (rows != "v_KHD")


@pytest.mark.parametrize(("field", "value"), [("rms_norm_eps", "small"), ("rms_norm_eps", 0)])
def test_an_epsilon_that_is_no_number_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    config = make(tmp_path / "source", "qwen3") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), field: value}))
    with pytest.raises(InvalidInput, match=rf"{field} {value!r}, where a positive .* most 1e.30 is needed"):
        open_source(config.parent).scoring(0)


@pytest.mark.parametrize("values", [2, 6, 8])
@pytest.mark.parametrize("window", [None, 3])
def test_keys_and_values_of_any_width_mix_alike(values: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator, dtype=torch.float64)

    layer = LatentAttention(
        q_nope_NPA=drawn(2, 4, 8),
        q_rope_NRA=drawn(2, 2, 8),
        down_CD=drawn(5, 8),
        k_rope_RD=drawn(2, 8),
        k_up_NPC=drawn(2, 4, 5),
        v_up_NHC=drawn(2, values, 5),
        o_DNH=drawn(8, 2, values),
        scale=0.1,
    )
    input_BTD, slots_S = drawn(2, 7, 8), torch.tensor([0.5], dtype=torch.float64)
    fused = attend(layer, input_BTD, slots_S, Scoring(window=window))
    # Bounded scores are mixed without a kernel, and a bound far above them changes nothing.
    torch.testing.assert_close(fused, attend(layer, input_BTD, slots_S, Scoring(window=window, soft_cap=1e6)))


def test_windows_are_those_of_the_layers_that_have_one(tmp_path: Path) -> None:
    config = make(tmp_path / "source", "gemma2") / "config.json"
    assert [open_source(config.parent).window(layer) for layer in range(2)] == [9, None]
    for settings, wanted in (
        ({"use_sliding_window": False}, [None, None]),
        ({"layer_types": None}, [9, None]),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": None}, [None, None]),
    ):
        changed = tmp_path / str(len(list(tmp_path.iterdir())))
        changed.mkdir()
        (changed / "model.safetensors").symlink_to(config.with_name("model.safetensors"))
        (changed / "config.json").write_text(json.dumps({**json.loads(config.read_text()), **settings}))
        assert [open_source(changed).window(layer) for layer in range(2)] == wanted


@pytest.mark.parametrize(("keys", "values"), [(6, 8), (8, 6), (10, 6), (7, 7), (8, 8)])
def test_a_fused_kernel_gets_one_width(keys: int, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a multiple of four; `meta` stands for one here."""
    seen = []

    def fused(*rows: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append({tensor.shape[-1] for tensor in rows})
        return rows[-1]

    monkeypatch.setattr(forward, "scaled_dot_product_attention", fused)
    for device in ("cpu", "meta"):
        q, k, v = (torch.zeros(1, 2, 3, width, device=device) for width in (keys, keys, values))
        assert forward._fused(q, k, v).shape == v.shape
    wide = max(keys, values)
    assert seen == [{wide}, {wide + -wide % 4}]
