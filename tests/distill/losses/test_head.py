"""The short way to the logits is the model's own, for every form of head that a family has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.distill.data.batch import Batch
from kvfold.distill.losses.predictions import predict
from kvfold.models.causal_lm import Loaded
from kvfold.models.head import HeadForm, check_head, head_form, head_logits, last_hidden

from ...support.tiny import make

# Where it is large enough to bite, and what is then found.
HEADS: dict[str, tuple[dict[str, Any], HeadForm, bool]] = {
    "llama": ({}, HeadForm(), False),
    "gemma2": ({"final_logit_softcapping": 0.5}, HeadForm(1.0, 0.5), False),
    "gemma3_text": ({"final_logit_softcapping": 0.5}, HeadForm(1.0, 0.5), False),
    "cohere": ({"logit_scale": 0.0625}, HeadForm(0.0625), False),
    "granite": ({"logits_scaling": 3.0}, HeadForm(1 / 3), False),
    "phi": ({}, HeadForm(), True),
    "gptj": ({}, HeadForm(), True),
}


def load(directory: Path, family: str) -> Loaded:
    make(directory, family, **HEADS[family][0])
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    return Loaded(directory, None, model.config, model)


def batch(length: int = 12) -> Batch:
    ids = torch.arange(2 * length).view(2, length)
    return Batch(ids, ids, torch.arange(length).expand(2, length))


@pytest.mark.parametrize("family", HEADS)
def test_logits_are_the_models_own(family: str, tmp_path: Path) -> None:
    loaded, (_, form, has_bias) = load(tmp_path / "model", family), HEADS[family]
    check_head(loaded, torch.arange(8)[None])
    with torch.no_grad():
        predictions = predict(loaded.model, batch())
        expected = loaded.model(input_ids=batch().input_ids_BS).logits.flatten(0, 1)
        scored = head_logits(loaded.model, last_hidden(loaded, batch().input_ids_BS)).flatten(0, 1)
    assert (predictions.form, predictions.bias_V is not None) == (form, has_bias)
    for found in (predictions.logits(slice(None)), scored):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    plain = predictions._replace(bias_V=None, form=HeadForm()).logits(slice(None))
    assert torch.allclose(plain, expected, rtol=1e-3) == (family == "llama")  # what the form says matters


def test_a_form_that_the_configuration_does_not_tell_is_refused(tmp_path: Path) -> None:
    loaded = load(tmp_path / "model", "granite")
    loaded.model.config.logits_scaling = 2.9
    loaded.model.config.logit_scale = 2.0
    assert head_form(loaded.model).scale == pytest.approx(2.0 / 2.9)
    with pytest.raises(InvalidInput, match=r"\(GraniteForCausalLM\) scales .* logits .* in a way of its own"):
        check_head(loaded, torch.arange(8)[None])


def test_positions_are_those_of_the_batch(tmp_path: Path) -> None:
    """A document packed behind another is predicted as alone."""
    loaded = load(tmp_path / "model", "llama")
    ids = torch.arange(12)[None]
    packed = Batch(ids, ids, torch.cat([torch.arange(5), torch.arange(7)])[None])
    with torch.no_grad():
        alone = loaded.model(input_ids=ids[:, 5:]).logits[0]
        torch.testing.assert_close(
            predict(loaded.model, packed).logits(slice(5, None)), alone, rtol=1e-4, atol=1e-5
        )


def test_scored_tokens_are_kept(tmp_path: Path) -> None:
    loaded = load(tmp_path / "model", "phi")
    kept = torch.arange(24) % 3 == 0
    with torch.no_grad():
        predictions = predict(loaded.model, batch())
    torch.testing.assert_close(
        predictions.at(kept).logits(slice(None)), predictions.logits(slice(None))[kept]
    )
