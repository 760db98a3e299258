"""The two forms of kvfold's attention against computations that share nothing with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from click import ClickException
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.convert.cli import main
from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.models.causal_lm import load
from kvfold.models.code_files import foreign_code
from kvfold.models.shipped.attention_kvfold import KvfoldDecoupledAttention
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.folds import fold_latent
from ...support.latent_decoding import IDS, chunks
from ...support.tiny import make


def loaded(directory: Path, **options: Any) -> Any:
    return KvfoldForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS).logits
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_decoupled_latent_is_what_the_stock_class_computes(tmp_path: Path, family: str) -> None:
    source = make(tmp_path / "source", family, num_key_value_heads=4)
    stock = fold_latent(source, "--kv-budget", "50%", "--container", "stock", "--latent-norm", "linear")
    remote = fold_latent(source, "--kv-budget", "50%", "--container", "remote")
    expected = logits(AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32).eval())
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(source).eval())).abs().max() > 1e-3
    torch.testing.assert_close(logits(loaded(remote)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_intact_latent_is_the_source_with_projections_of_low_rank(tmp_path: Path, family: str) -> None:
    source = make(tmp_path / "source", family, num_key_value_heads=4)
    out = fold_latent(source, "--kv-budget", "25%", "--rope", "intact")
    dense, state = AutoModelForCausalLM.from_pretrained(source).eval(), load_file(out / "model.safetensors")
    exact = logits(dense)
    for number, layer in enumerate(dense.model.layers):
        place = f"model.layers.{number}.self_attn"
        up_KEC = state[f"{place}.kv_b_proj.weight"].unflatten(0, (4, -1))
        rows_KED = up_KEC @ state[f"{place}.kv_a_proj.weight"]
        keys_KHD, values_KHD = rows_KED.chunk(2, dim=1)
        layer.self_attn.k_proj.weight.data, layer.self_attn.v_proj.weight.data = (
            keys_KHD.flatten(0, 1),
            values_KHD.flatten(0, 1),
        )
    assert (exact - logits(dense)).abs().max() > 1e-3
    torch.testing.assert_close(logits(loaded(out)), logits(dense), atol=1e-5, rtol=0)


FORMS = {
    "decoupled": (), "intact": (), "decoupled, compressed": ("--q-lora-rank", "24"),
    "intact, compressed": ("--q-lora-rank", "24"),
}  # fmt: skip


@pytest.fixture(scope="module", params=FORMS)
def folded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make(
        tmp_path_factory.mktemp("forms") / "source", "qwen2", num_key_value_heads=2, hidden_size=128
    )
    rope = request.param.partition(",")[0]
    return fold_latent(
        source, "--kv-budget", "50%", "--container", "remote", "--rope", rope, *FORMS[request.param]
    )


@pytest.mark.parametrize(
    ("folded", "implementation"),
    [*((form, "eager") for form in FORMS), ("decoupled", "flex_attention"), ("intact", "flex_attention")],
    indirect=["folded"],
)
def test_every_attention_function_computes_the_same(folded: Path, implementation: str) -> None:
    if implementation == "flex_attention" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        # torch 2.13.0 compiles it so that it reads what was never written: NaN or, by chance, numbers, in a Llama too.
        pytest.skip(
            "without AVX-512, torch's flex_attention gives another result each time, in the source as well"
        )
    other = loaded(folded, attn_implementation=implementation)
    assert other.config._attn_implementation == implementation
    torch.testing.assert_close(logits(other), logits(loaded(folded)), atol=1e-5, rtol=0)


def test_layers_on_two_devices_generate(folded: Path) -> None:
    """By accelerate's hooks, as of `device_map="auto"`; the meta device stands for a second GPU."""
    model = loaded(folded)
    for part in (*model.model.layers[1:], model.model.norm, model.lm_head):
        add_hook_to_module(part.to("meta"), AlignDevicesHook(execution_device="meta"))
    with torch.no_grad():
        first = model(input_ids=IDS[:, :8], use_cache=True)
        again = model(input_ids=IDS[:, 8:9], past_key_values=first.past_key_values)
    assert again.logits.device.type == "meta"
    assert again.past_key_values.get_seq_length() == 9


def test_continuous_batching_is_refused(folded: Path) -> None:
    """Before anything is generated: the library's own thread would turn an error into empty lists."""
    with pytest.raises(NotImplementedError, match=r"use generate\(\), or fold the source with --to gqa"):
        loaded(folded).generate_batch([[3, 4, 5], [6, 7]], max_new_tokens=2)


def test_weights_of_attention_are_recorded(folded: Path) -> None:
    output = loaded(folded, attn_implementation="eager")(input_ids=IDS, output_attentions=True)
    assert len(output.attentions) == 2
    torch.testing.assert_close(output.attentions[1].sum(-1), torch.ones(2, 8, 40))


def test_gradient_checkpointing_changes_no_gradient(folded: Path) -> None:
    found = []
    for checkpointing in (False, True):
        model = loaded(folded).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(gradient is not None for gradient in found[0].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_frequencies_stay_exact_in_bfloat16(folded: Path) -> None:
    model = loaded(folded)
    before = model.model.rotary_emb.inv_freq.clone()
    assert torch.equal(model.to(torch.bfloat16).model.rotary_emb.inv_freq, before)


def test_absorbing_the_up_projections_changes_nothing(folded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a padded text through the cache: attention in the latent against expanded keys."""
    taken = []
    absorbed = KvfoldDecoupledAttention._absorbed
    monkeypatch.setattr(
        KvfoldDecoupledAttention, "_absorbed", lambda *args: taken.append(1) or absorbed(*args)
    )
    one = chunks(loaded(folded))[:, 5:]
    monkeypatch.setattr(KvfoldDecoupledAttention, "_absorbs", lambda *_: False)
    torch.testing.assert_close(chunks(loaded(folded))[:, 5:], one, atol=1e-5, rtol=0)
    assert bool(taken) == (loaded(folded).config.kvfold["form"] == "decoupled")


def test_code_that_is_not_ours_does_not_run(folded: Path) -> None:
    """Code that kvfold shipped is loaded by kvfold's own classes; a changed file is refused, not run."""
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    words.save(str(folded / "tokenizer.json"))
    assert load(folded, Options(device="cpu")).model.config.model_type == "kvfold"
    path = folded / "modeling_kvfold.py"
    kept = path.read_text()
    path.write_text(kept + "\nraise SystemError\n")
    with pytest.raises(InvalidInput, match="is not that of this kvfold"):
        load(folded, Options(device="cpu"))
    path.unlink()
    with pytest.raises(InvalidInput, match=r"lacks files of its code \(modeling_kvfold.py\)"):
        load(folded, Options(device="cpu"))
    assert foreign_code(folded) == "files of its code are missing (modeling_kvfold.py)"
    path.write_text(kept)


@pytest.mark.parametrize(("family", "options", "words"), [
    ("cohere2", ("--rope", "decoupled"), "unlike rotary embeddings"),
    ("qwen3", ("--rope", "decoupled", "--method", "transmla"), "no place for the key norms"),
    ("llama", ("--container", "stock", "--rope", "intact"), "--container remote"),
    ("llama", ("--rope", "intact", "--rope-dim", "4"), "no rotary key"),
    ("llama", ("--rope", "intact", "--rank", "33"), "1 to 32"),
    ("gpt2", ("--rope", "intact"), "has none"),
    ("llama", ("--to", "mqa", "--container", "remote"), "own class"),
    ("llama", ("--to", "mqa", "--rope", "intact"), "--rope does not apply"),
])  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, family: str, options: tuple[str, ...], words: str) -> None:
    source = make(tmp_path / "source", family)
    rank = () if "--rank" in options or "mqa" in options else ("--rank", "8")
    with pytest.raises(ClickException, match=words):
        main(
            [str(source), "--to", "mla", *rank, *options, "--out", str(tmp_path / "out")],
            standalone_mode=False,
        )
