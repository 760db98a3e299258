"""A packed window computes what its documents compute by themselves, in every class."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
)

from kvfold.convert.families.rows import FAMILIES
from kvfold.core.errors import InvalidInput
from kvfold.distill.data.batch import Batch
from kvfold.distill.losses.predictions import predict
from kvfold.distill.stages.isolation import isolate_documents
from kvfold.models.caches import has_other_layers
from kvfold.models.causal_lm import with_base
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.folds import fold_latent
from ...support.tiny import make

LENGTH = 24
# The documents of two windows; a document of one token among them.
CUTS = ((0, 7, 8, 20, LENGTH), (0, 13, LENGTH))
IDS_BS = torch.arange(2 * LENGTH).reshape(2, LENGTH) ** 2 * 7 % 97
OLD = Version(transformers.__version__) < Version("5.24")  # Falcon's mask knows no position ids there
# Classes that make their mask without them.
UNAWARE = {"opt", "gpt_oss", "afmoe"} | ({"falcon"} if OLD else set())
REFUSED = {"llama4_text"}  # documents meet with every mask that transformers 5.24 makes for it
OWN = [  # families of each form of attention: every kind of mask, of positions, of host
    *((family, "decoupled") for family in ("llama", "gpt_neox", "gpt2", "ministral", "falcon", "opt")),
    *(
        (family, "intact")
        for family in ("llama", "gemma3_text", "qwen3", "gpt_neox", "ministral", "falcon", "gpt_oss")
    ),
]
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}


@torch.no_grad()
def leak(model: Any) -> float:
    """The largest relative difference of a last hidden state between a packed document and it alone."""
    position_BS = torch.stack(
        [torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(cuts)]) for cuts in CUTS]
    )
    packed_TD = predict(model, Batch(IDS_BS, IDS_BS, position_BS)).hidden_TD
    packed_BSD = packed_TD.unflatten(0, IDS_BS.shape)
    worst = 0.0
    for row, cuts in enumerate(CUTS):
        for start, end in itertools.pairwise(cuts):
            alone_1SD = model.base_model(
                input_ids=IDS_BS[row : row + 1, start:end], use_cache=False
            ).last_hidden_state
            worst = max(
                worst, float((packed_BSD[row, start:end] - alone_1SD[0]).abs().max() / alone_1SD.abs().max())
            )
    return worst


def check(model: Any) -> None:
    model.eval()
    isolate_documents(model, "the model")
    assert leak(model) < 1e-5


def attentions(load: Any) -> list[Any]:
    """A model with every kind of attention that its class has on a CPU."""
    models = []
    for kind in ("sdpa", "eager"):
        try:
            models.append(load(kind))
        except ValueError as refusal:  # transformers has no such attention for the class
            if "does not support an attention implementation" not in str(refusal):
                raise
    assert models
    return models


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    source = make(tmp_path / "model", family, **SHAPE)
    for model in attentions(
        lambda kind: with_base(AutoModelForCausalLM.from_pretrained(source, attn_implementation=kind).eval())
    ):
        if family in REFUSED or has_other_layers(model.config):
            with pytest.raises(InvalidInput, match="cannot keep packed documents apart"):
                isolate_documents(model, "the model")
            continue
        if family not in UNAWARE:
            assert leak(model) < 1e-5
        else:
            assert leak(model) > 1e-2
        check(model)


@pytest.mark.parametrize(("family", "rope"), OWN)
def test_models_with_their_own_code(tmp_path: Path, family: str, rope: str) -> None:
    source = make(tmp_path / "model", family, **SHAPE)
    folded = fold_latent(source, "--rope", rope, "--kv-budget", "50%", "--container", "remote")
    for model in attentions(lambda kind: KvfoldForCausalLM.from_pretrained(folded, attn_implementation=kind)):
        check(model)


def test_the_stock_latent_class_and_the_hosts_of_other_families() -> None:
    torch.manual_seed(0)
    latent = DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=2,
        initializer_range=0.3,
    )  # fmt: skip
    bigcode = GPTBigCodeConfig(
        vocab_size=97, n_embd=32, n_head=4, n_layer=2, n_positions=64, initializer_range=0.3
    )
    for kind in ("sdpa", "eager"):
        check(DeepseekV3ForCausalLM._from_config(latent, attn_implementation=kind))
        check(GPTBigCodeForCausalLM._from_config(bigcode, attn_implementation=kind))


def test_a_class_that_cannot_is_refused_and_left_as_it_was() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))
    size = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    falcon = FalconForCausalLM(FalconConfig(**size, alibi=True))
    if not OLD:
        check(falcon)
    for model in (bloom, falcon) if OLD else (bloom,):
        with pytest.raises(InvalidInput, match=r"model \(\w+ForCausalLM\) cannot keep .* apart; use --set"):
            isolate_documents(model.eval(), "model")
        assert not model.base_model._forward_pre_hooks
