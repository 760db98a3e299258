"""Models with more logits than tokens: a run finds what `kvfold eval` finds."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.distill.run.job import distill
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import read_text

from ...support.distillation import curve
from ...support.tokenizers import save_tokenizer
from ..conftest import MakeRecipe


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(264, 300), (300, 264)])
def test_padded_vocabularies_are_read_as_eval_reads_them(
    make_recipe: MakeRecipe, held: Path, tmp_path: Path, cached: bool, ours: int, theirs: int
) -> None:
    """258 tokens, and logits beyond them that are no smaller; in float32, so that nothing is rounded."""
    for seed, (name, width) in enumerate((("ours", ours), ("theirs", theirs))):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=width, initializer_range=0.3, **sizes)).save_pretrained(
            tmp_path / name
        )
        save_tokenizer(tmp_path / name)
    models = {"student": str(tmp_path / "ours"), "teacher": str(tmp_path / "theirs")}
    cache = {"teacher_cache": str(tmp_path / "cache")} if cached else {}
    losses = {"kl": 0.5, "ce": 0.5}
    recipe = make_recipe(
        **models, **cache, tokens=576, losses=losses, evaluate={"source": str(held), "windows": 6}
    )
    out = distill(recipe).output
    points = curve(out)["points"]
    for directory, point in ((tmp_path / "ours", points[0]), (out, points[-1])):
        found = evaluate(
            directory, tmp_path / "theirs", read_text(str(held)), Options(window=32, max_windows=6)
        )
        assert point["perplexity"] == pytest.approx(found.ppl.student.perplexity, rel=1e-5)
        assert point["kl"] == pytest.approx(found.fidelity.kl.mean, rel=1e-4)
        assert point["same_top1"] == pytest.approx(found.fidelity.same_top1.mean, abs=1e-6)
        assert curve(out)["teacher_perplexity"] == pytest.approx(found.ppl.teacher.perplexity, rel=1e-5)
