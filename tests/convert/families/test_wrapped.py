"""Folded and absorbed models as other libraries wrap them: offloading, adapters, copies, quantisers."""

import ast
import copy
import inspect
import pickle
import textwrap
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn

import kvfold
from kvfold.models.shipped.attention_kvfold import FORMS
from kvfold.models.shipped.decoding_kvfold import is_plain
from kvfold.models.shipped.layers_kvfold import LEVEL
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.folds import fold_latent
from ...support.latent_decoding import IDS, counted, latent_model
from ...support.tiny import make

MODELS = ("decoupled", "intact", "absorbed")


def made(name: str, directory: Path, family: str = "llama", **options: Any) -> Any:
    if name == "absorbed":
        return kvfold.absorb(latent_model(v_head_dim=16))
    source = make(directory / family, family, num_key_value_heads=4)
    fold = fold_latent(source, "--kv-budget", "50%", "--container", "remote", "--rope", name)
    return KvfoldForCausalLM.from_pretrained(fold, dtype=torch.float32, **options).eval()


@torch.no_grad()
def at_once(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@torch.no_grad()
def by_token(model: Any) -> Tensor:
    """The same logits, the last eight tokens of them one by one from the cache."""
    first = model(input_ids=IDS[:, :-8], use_cache=True)
    steps = [model(input_ids=IDS[:, [t]], past_key_values=first.past_key_values).logits for t in range(-8, 0)]
    return torch.cat([first.logits, *steps], dim=1)


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_elsewhere_until_a_module_is_called(name: str, tmp_path: Path) -> None:
    expected = at_once(made(name, tmp_path / "whole"))
    model = accelerate.cpu_offload(made(name, tmp_path / "away"), execution_device=torch.device("cpu"))
    check(by_token(model), expected)


def test_hooks_that_move_no_weights_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate puts them on every module of a model on several GPUs."""
    model = accelerate.dispatch_model(made("absorbed", tmp_path), {"": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[0].self_attn.kv_b_proj, "_hf_hook")
    with counted(monkeypatch) as taken:
        by_token(model)
    assert len(taken) == 2 * 8, "both layers at every step"


def test_a_model_of_deepseeks_may_be_absorbed_in_half_precision_and_offloaded() -> None:
    model = kvfold.absorb(
        accelerate.cpu_offload(latent_model(v_head_dim=16).half(), execution_device=torch.device("cpu"))
    )
    assert by_token(model).isfinite().all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["lora", "of a parameter", "dora", "ia3"])
def test_an_adapter_is_heard_in_decoding_too(kind: str, name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    before = at_once(model)
    settings: Any = {
        "lora": LoraConfig(r=4, target_modules=["kv_b_proj"]),
        "of a parameter": LoraConfig(r=4, target_parameters=["kv_b_proj.weight"]),
        "dora": LoraConfig(r=4, target_modules=["kv_b_proj"], use_dora=True),
        "ia3": IA3Config(target_modules=["kv_b_proj"], feedforward_modules=[]),
    }[kind]
    adapted = get_peft_model(model, settings).eval()
    for key, weight in adapted.named_parameters():
        if "lora_B" in key or "ia3_l" in key:
            nn.init.normal_(weight, 0.0, 0.3)
    expected = at_once(adapted)
    assert (expected - before).abs().max() > 1e-2
    check(by_token(adapted), expected)
    check(by_token(adapted.merge_and_unload()), expected)


class Rounded(Tensor):
    """An int8 weight with scales of rows that only `nn.functional.linear` takes; it passes for float32."""

    @staticmethod
    def __new__(cls, rounded: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, rounded.shape, dtype=scale.dtype)

    def __init__(self, rounded: Tensor, scale: Tensor) -> None:
        self.rounded, self.scale = rounded, scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return func(x, weight.rounded * weight.scale, bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].rounded, args[0].scale)
        raise NotImplementedError(f"a rounded weight has no {func}")


def round_weights(model: Any) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            exact = module.weight.detach()
            scale = exact.abs().amax(1, keepdim=True) / 127
            rounded = Rounded((exact / scale).round().to(torch.int8), scale)
            module.weight = nn.Parameter(rounded, requires_grad=False)


@pytest.mark.parametrize("name", ["decoupled, qwen3", *MODELS])
def test_a_weight_of_another_class_is_called(name: str, tmp_path: Path) -> None:
    model = made(*name.split(", ")[:1], tmp_path, *name.split(", ")[1:])
    before = at_once(model)
    round_weights(model)
    assert isinstance(model.model.layers[0].self_attn.kv_b_proj.weight, nn.Parameter)
    expected = at_once(model)
    assert (expected - before).abs().max() > 1e-3
    check(by_token(model), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", ["call", "hook", "earlier hook"])
def test_a_changed_call_is_made(change: str, name: str, tmp_path: Path) -> None:
    """As compressed-tensors replaces `forward`, and observers and weight norms add hooks."""
    model = made(name, tmp_path)
    before = at_once(model)
    for layer in model.model.layers:
        up = layer.self_attn.kv_b_proj
        if change == "call":
            up.forward = lambda x, call=up.forward: 2 * call(x)
        elif change == "hook":
            up.register_forward_hook(lambda module, given, made: 2 * made)
        else:
            up.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    expected = at_once(model)
    assert (expected - before).abs().max() > 1e-2
    check(by_token(model), expected)


def test_a_traced_weight_is_plain() -> None:
    """An exported decoding step multiplies weights as the model does."""
    found = []

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            found.append(is_plain(self.up))
            return self.up(x)

    torch.export.export(Holder(), (torch.zeros(1, 2),))
    assert found
    assert all(found)


@pytest.mark.parametrize("name", ["decoupled, qwen3", *MODELS])
@pytest.mark.parametrize(
    "scheme", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_weights_of_torchao(scheme: str, name: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="it quantises the model")
    model = made(*name.split(", ")[:1], tmp_path, *name.split(", ")[1:])
    quantization.quantize_(model, getattr(quantization, scheme)())
    found, expected = by_token(model), at_once(model)
    # Activations that are rounded while the model runs turn differences of the last bit into steps.
    bound = 0.05 if "Activation" in scheme else 1e-5
    torch.testing.assert_close(found, expected, atol=bound * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="it rounds weights when a module is called"
    )
    model = made(name, tmp_path)
    before = at_once(model)
    group = {"targets": ["re:.*kv_b_proj"], "weights": {"num_bits": 4, "strategy": "channel"}}
    quantization.apply_quantization_config(
        model, quantization.QuantizationConfig(config_groups={"group_0": group})
    )
    for layer in model.model.layers:
        up = layer.self_attn.kv_b_proj
        up.weight_scale.data = up.weight.detach().abs().amax(1, keepdim=True) / 7
    expected = at_once(model)
    assert (expected - before).abs().max() > 1e-2
    check(by_token(model), expected)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_pickles_compute_the_same(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    expected = by_token(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check(by_token(other), expected)
        assert type(other) is type(model)
        with torch.no_grad():
            next(other.parameters()).zero_()
    check(by_token(model), expected)


@pytest.mark.parametrize(
    ("form", "family"), [("decoupled", "gemma2"), ("intact", "gemma2"), ("intact", "gpt_oss")]
)
def test_caps_and_sinks_count_in_prefill_by_sdpa_too(form: str, family: str, tmp_path: Path) -> None:
    expected = at_once(made(form, tmp_path / "eager", family, attn_implementation="eager"))
    model = made(form, tmp_path / "sdpa", family)
    # What some releases of transformers choose for some of these families.
    model.config._attn_implementation = "sdpa"
    check(at_once(model), expected)
    check(by_token(model), expected)


def test_what_holds_a_model_is_levelled_with_it() -> None:
    holder = nn.Sequential(latent_model(v_head_dim=16))
    assert kvfold.absorb(holder)[0].config._attn_implementation == LEVEL


@pytest.mark.parametrize("form", FORMS)
def test_vllm_finds_the_attention_call_in_forward(form: str) -> None:
    """By the text: one name gets what `ALL_ATTENTION_FUNCTIONS` gives, and is called once."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(FORMS[form].forward)))
    lookups = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "ALL_ATTENTION_FUNCTIONS." in ast.unparse(node.value)
    ]
    (name,) = (target.id for node in lookups for target in node.targets if isinstance(target, ast.Name))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
    assert len(calls) == 1
    assert [ast.unparse(word.value) for word in calls[0].keywords if word.arg == "scaling"] == [
        "self.scaling"
    ]
