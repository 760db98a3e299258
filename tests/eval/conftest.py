"""Tiny random checkpoints on disk, with a tokenizer of their own; no network."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from kvfold.eval.suites import harness
from kvfold.texts.corpus import Text

from ..support.commands import run_main
from ..support.tokenizers import save_tokenizer

Make = Callable[..., Path]
VOCABULARY = 258
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # sure of something, so that mistakes show
}
# The dense DeepSeek-V3 that MLA checkpoints are written as.
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 48, "num_nextn_predict_layers": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Write a random checkpoint: a Llama, or with `latent` a DeepSeek-V3, with other configuration values."""

    def build(
        seed: int = 0, bos: str | None = "<s>", last: str = "end", latent: bool = False, **changes: Any
    ) -> Path:
        directory = tmp_path_factory.mktemp("checkpoint")
        config = DeepseekV3Config(**SHAPE | LATENT | changes) if latent else LlamaConfig(**SHAPE | changes)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        save_tokenizer(directory, bos, last)
        return directory

    return build


@pytest.fixture(scope="session")
def mha(make: Make) -> Path:
    """A Llama with as many key/value heads as query heads."""
    return make()


@pytest.fixture(scope="session")
def other(make: Make) -> Path:
    """The same architecture, other weights."""
    return make(seed=1)


def run(*arguments: str | Path, code: int | None = None) -> Result:
    """Run `kvfold eval`, which must end with `code` if that is given."""
    return run_main("eval", *arguments, code=code)


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory, text: Text) -> Path:
    """The text in a file."""
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text(text.joined, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text() -> Text:
    """600 tokens, no two windows alike."""
    draw = random.Random(0)
    return Text("text:letters.txt", ("".join(draw.choices("key value cache head fold", k=600)),))


_WORDS = ("key", "value", "cache", "head", "fold", "rank", "latent", "query", "layer", "token")
_CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
_PAGES = """
task: pages
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: !function plain.wikitext_detokenizer
process_results: !function plain.process_results
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tasks `kv_one`, `kv_two`, their group, and `pages` (WikiText-2 on `pages.json`), and no others."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks", reason="pip install 'kvfold[eval]' for tasks")
    manager = lm_eval_tasks.TaskManager
    monkeypatch.setattr(
        lm_eval_tasks, "TaskManager", lambda **given: manager(**given | {"include_defaults": False})
    )
    harness._list.cache_clear()
    directory = tmp_path / "own"
    directory.mkdir()
    cache = tmp_path / "datasets"
    for name, count in (("kv_one", 24), ("kv_two", 5)):
        rows = [
            {"question": f"{_WORDS[n % 10]} {n} {name}", "choices": ["one", "two", "three"], "gold": n % 3}
            for n in range(count)
        ]
        file = directory / f"{name}.json"
        file.write_text("\n".join(map(json.dumps, rows)))
        (directory / f"{name}.yaml").write_text(_CHOICE.format(name=name, file=file, cache=cache))
    (directory / "both.yaml").write_text(
        "group: kv_both\ntask: [kv_one, kv_two]\naggregate_metric_list: [{metric: acc, weight_by_size: "
        "true}]\n"
    )
    (directory / "pages.yaml").write_text(_PAGES.format(file=directory / "pages.json", cache=cache))
    (directory / "plain.py").write_text(
        "from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer\n"
    )
    return directory
