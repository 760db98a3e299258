"""A linearised norm opened for training computes the same, has natural sizes, and closes again."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvfold.convert.cli import main
from kvfold.convert.formats import to_published, to_trainable

from ...support.tiny import make


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_open_and_close_change_nothing(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    source, out = make(tmp_path / "source", family), tmp_path / "out"
    options = ["--to", "mla", "--rank", "24", "--calibration", "none", "--latent-norm", "linear"]
    assert CliRunner().invoke(main, [str(source), *options, "--out", str(out)]).exit_code == 0
    written = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    opened = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    to_trainable(opened)
    ids = torch.arange(40)[None] % 97
    with torch.no_grad():
        torch.testing.assert_close(
            opened(input_ids=ids).logits, written(input_ids=ids).logits, atol=2e-5, rtol=0
        )
    down = opened.model.layers[0].self_attn.kv_a_proj_with_mqa.weight
    assert 1e-3 < down[:24].square().mean().sqrt() < 10, "an optimizer could not train this"
    assert not any("layernorm.weight" in name and "_a_" in name for name in opened.state_dict())

    published = to_published(opened, opened.state_dict())
    before = written.state_dict()
    assert published.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(published[name], tensor, atol=0, rtol=1e-6, msg=name)


def test_models_without_a_linearised_norm_are_left_alone(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(make(tmp_path / "llama"))
    true_norm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("deepseek_v3", vocab_size=9, hidden_size=16, intermediate_size=16,
                             num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8,
                             qk_rope_head_dim=4,
                             qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1, n_routed_experts=2,
                             n_group=1,
                             topk_group=1, num_experts_per_tok=1)
    )  # fmt: skip
    for model in (llama, true_norm):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        to_trainable(model)
        after = to_published(model, model.state_dict())
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
