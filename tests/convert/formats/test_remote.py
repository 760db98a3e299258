"""The remote container, loaded by code next to the weights, in one process that cannot import kvfold."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvfold.convert.cli import main

from ...support.tiny import make
from ...support.warm_python import warm_python

PROBE = """
import json, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers import StaticCache
ids = torch.arange(2 * 300).reshape(2, 300) ** 2 * 7 % 97  # far positions: where a rounded frequency shows
padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids[:, :6]], 1)
padded[1, :3] = ids[1, 6:9]  # the first row is shorter: padded on the left
mask = torch.ones_like(padded)
mask[0, :3] = 0

def greedy(model, tokens, **options):
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(tokens, **settings, **options).tolist()

source, folded = sys.argv[1:]
one = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
other, info = AutoModelForCausalLM.from_pretrained(
    folded, dtype=torch.float32, trust_remote_code=True, output_loading_info=True
)
other.eval()
with torch.no_grad():
    a, b = one(input_ids=ids).logits, other(input_ids=ids).logits
    cache = other(input_ids=ids, use_cache=True).past_key_values
    base = AutoModel.from_pretrained(folded, dtype=torch.float32, trust_remote_code=True).eval()
    hidden = base(input_ids=ids).last_hidden_state - other.base_model(input_ids=ids).last_hidden_state
    tokens = {
        "source": greedy(one, ids[:, :8]),
        "cached": greedy(other, ids[:, :8]),
        "uncached": greedy(other, ids[:, :8], use_cache=False),
        "static": greedy(other, ids[:, :8], cache_implementation="static"),
        "beams": greedy(other, ids[:, :8], num_beams=3),
        "source beams": greedy(one, ids[:, :8], num_beams=3),
        "padded": greedy(other, padded, attention_mask=mask),
        "source padded": greedy(one, padded, attention_mask=mask),
    }
other.save_pretrained(folded + "-again")
again = AutoModelForCausalLM.from_pretrained(folded + "-again", dtype=torch.float32, trust_remote_code=True).eval()
with torch.no_grad():
    kept = (again(input_ids=ids[:, :20]).logits - other(input_ids=ids[:, :20]).logits).abs().max().item()
print(json.dumps({
    "diff": (a - b).abs().max().item(), "size": a.std().item(), "tokens": tokens, "kept": kept,
    "base": hidden.abs().max().item(), "class": type(other).__name__, "stock": isinstance(other, type(one)),
    "missing": sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]),
    "cached": sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values)) / ids.numel(),
}))
assert "kvfold" not in sys.modules
"""
FULL = ("--to", "mla", "--rank", "full", "--container", "remote")
INTACT = (*FULL, "--rope", "intact")
QUERIES = ("--q-lora-rank", "full")
# name -> (family, how the source is made, options of convert, elements cached per token by both layers)
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int]] = {
    "llama-mha": ("llama", {}, FULL, 256),
    "llama-gqa-llama3": ("llama", {"num_key_value_heads": 2, "rope": "llama3"}, FULL, 64),
    "llama-yarn-biases": ("llama", {"rope": "yarn", "attention_bias": True, "num_key_value_heads": 2}, FULL,
                          64),
    "mistral": ("mistral", {"num_key_value_heads": 4}, FULL, 128),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}, FULL, 32),
    "llama-mha-intact": ("llama", {}, INTACT, 64 + 3),
    "llama-gqa-llama3-intact": ("llama", {"num_key_value_heads": 1, "rope": "llama3"}, INTACT, 32 + 3),
    "qwen2-intact": ("qwen2", {"num_key_value_heads": 2}, INTACT, 32 + 3),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}, FULL, 64 + 3),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}, FULL, 32 + 3),
    # Its key norm spans all heads, and is as wide as a head.
    "olmo2-one-key-head": ("olmo2", {"num_key_value_heads": 1}, FULL, 16 + 3),
    "olmo2-one-key-head-decoupled": ("olmo2", {"num_key_value_heads": 1}, (*FULL, "--rope", "decoupled"), 16),
    "gpt2": ("gpt2", {}, FULL, 64),
    "qwen2-queries": ("qwen2", {"num_key_value_heads": 2}, (*FULL, *QUERIES), 32),
    "qwen3-queries": ("qwen3", {"num_key_value_heads": 2}, (*FULL, *QUERIES), 64 + 3),
    "llama-intact-queries": ("llama", {"num_key_value_heads": 2, "hidden_size": 128}, (*INTACT, *QUERIES),
                             64 + 3),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_full_rank_is_the_source(case: str, tmp_path: Path) -> None:
    """Logits within 5e-5 in float32 (they vary by `size`), by a stock subclass, with every weight found."""
    family, settings, options, cached = CASES[case]
    source, out = make(tmp_path / "source", family, **settings), tmp_path / "out"
    main([str(source), *options, "--out", str(out)], standalone_mode=False)
    done = subprocess.run(
        [warm_python(), "-P", "-c", PROBE, str(source), str(out)], capture_output=True, text=True,
        cwd=tmp_path, check=False,
        env={"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
             "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["size"] > 0.05, "logits too small to tell anything"
    assert seen["diff"] < 5e-5
    assert (seen["class"], seen["stock"], seen["missing"]) == ("KvfoldForCausalLM", True, [])
    assert seen["base"] == seen["kept"] == 0, "the base model, or the model that was saved again, differs"
    # Where rotation is left intact, one layer caches the three digits of the position too.
    assert seen["cached"] == cached
    tokens = seen["tokens"]
    assert tokens["cached"] == tokens["uncached"] == tokens["static"] == tokens["source"]
    # With padding on the left and with beams rows change places.
    assert tokens["padded"] == tokens["source padded"]
    assert tokens["beams"] == tokens["source beams"]
