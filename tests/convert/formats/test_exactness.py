"""At full rank the written checkpoint, loaded by a process that knows no kvfold, is its source."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvfold.convert.cli import main

from ...support.tiny import make
from ...support.warm_python import warm_python

# Runs apart from the tests, where kvfold cannot be imported even by accident.
PROBE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
ids = torch.arange(2 * 300).reshape(2, 300) ** 2 * 7 % 97  # far positions: where a rounded frequency shows
source, folded = sys.argv[1:]
one = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
other = AutoModelForCausalLM.from_pretrained(folded, dtype=torch.float32).eval()
with torch.no_grad():
    a, b = one(input_ids=ids).logits, other(input_ids=ids).logits
    greedy = [m.generate(ids[:, :8], max_new_tokens=16, do_sample=False, pad_token_id=0).tolist() for m in (one, other)]
assert "kvfold" not in sys.modules
print(json.dumps({"diff": (a - b).abs().max().item(), "size": a.std().item(), "same": greedy[0] == greedy[1],
                  "class": type(other).__name__}))
"""
# name -> (family, how the source is made, options of convert)
FULL = ("--to", "mla", "--rank", "full")
QUERIES = (*FULL, "--q-lora-rank", "full")
# of 8 heads 8 wide, whose values are one head's
EVERY_PAIR = ("--to", "mla", "--rope-dim", "64", "--rank", "8", "--method")
CASES = {
    "llama-mha": ("llama", {}, FULL),
    "llama-gqa-untied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}, FULL),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, FULL),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, FULL),
    "llama-wide-heads": ("llama", {"head_dim": 12, "num_key_value_heads": 4}, FULL),
    "llama-sharded": ("llama", {"shard_size": "20KB"}, FULL),
    "llama-biases": ("llama", {"attention_bias": True}, FULL),
    "llama-llama3": ("llama", {"rope": "llama3"}, FULL),
    "llama-yarn": ("llama", {"rope": "yarn", "num_key_value_heads": 4}, FULL),
    "llama-linear": ("llama", {"rope": "linear"}, FULL),
    "mistral": ("mistral", {"num_key_value_heads": 4}, FULL),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}, FULL),
    "qwen2-mha-tied": ("qwen2", {"tie_word_embeddings": True}, FULL),
    "llama-4x-config": ("llama", {"old_config": True, "rope": "llama3", "tie_word_embeddings": True}, FULL),
    "mistral-4x-config": ("mistral", {"old_config": True, "num_key_value_heads": 4}, FULL),
    "qwen2-4x-config": ("qwen2", {"old_config": True, "num_key_value_heads": 2, "sliding_window": 64}, FULL),
    "llama-queries": ("llama", {"num_key_value_heads": 2}, QUERIES),
    "llama-queries-wide": ("llama", {"hidden_size": 128}, QUERIES),
    "qwen2-queries": ("qwen2", {"num_key_value_heads": 2}, QUERIES),
    "llama-mha2mla": ("llama", {"equal_heads": True},
                      (*EVERY_PAIR, "mha2mla:high", "--latent-norm", "linear")),
    "llama-mha2mla-split": ("llama", {"equal_heads": True},
                            (*EVERY_PAIR, "mha2mla:low:split", "--latent-norm", "linear")),
    "llama-same-heads": ("llama", {}, ("--to", "gqa", "--kv-heads", "8")),
    "qwen2-same-heads": ("qwen2", {"num_key_value_heads": 4},
                         ("--to", "gqa", "--kv-heads", "4", "--method", "mean")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_full_rank_is_the_source(case: str, tmp_path: Path) -> None:
    """Logits within 5e-5 in float32 (they vary by `size`), the same greedy tokens, a stock class."""
    family, settings, options = CASES[case]
    source, out = make(tmp_path / "source", family, **settings), tmp_path / "out"
    main([str(source), *options, "--out", str(out)], standalone_mode=False)
    words = [warm_python(), "-P", "-c", PROBE, str(source), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["size"] > 0.1, "logits too small to tell anything"
    assert seen["diff"] < 5e-5
    assert seen["same"]
    own = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}[family]
    assert seen["class"] == ("DeepseekV3ForCausalLM" if "mla" in options else own)


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "mean"), ("mistral", "aligned"), ("qwen2", "subspace")]
)
def test_as_many_groups_as_heads_changes_no_byte(tmp_path: Path, family: str, method: str) -> None:
    source = make(tmp_path / "source", family, dtype=torch.bfloat16)
    out = tmp_path / "out"
    main(
        [str(source), "--to", "gqa", "--kv-heads", "8", "--method", method, "--out", str(out)],
        standalone_mode=False,
    )
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)
