"""The rules about SGLang that say what fails, held against SGLang: part of `make test-sglang`.

`python -m benchmarks.sglang_rules` makes outputs that break a rule, and runs SGLang on them. Each must end
with the error that the rule names, or be as wrong as it says. Exit code 1 where a rule is not true.
"""

import json
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput
from kvfold.engines.fresh_process import PROBES, run_apart

from .rule_rows import WRONG, finish, fold, ruled, text

STEPS = 4  # tokens that greedy decoding adds
_STOCK = "--to mla --rank 512 --engine sglang"
_STATISTICS = "--calibration stdlib --sequences 4 --length 128 --refine 0"
_GQA = "--to gqa --kv-heads 2"
DIFFERS = "differs"


class Case(NamedTuple):
    """An output that breaks a rule.

    Attributes:
        source: of folds.SOURCES, or `demo`.
        options: of `kvfold convert`.
        condition: of the rule.
        says: DIFFERS, or words of the error.
        spoil: what is done to the output by hand.
        trust: whether its own code may run.
    """

    source: str
    options: str
    condition: str
    says: str
    spoil: Callable[[Path], None] | None = None
    trust: bool = False


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return a function that sets fields of an output's config.json; `...` deletes one."""

    def apply(directory: Path) -> None:
        file = directory / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | changes
        kept = {name: value for name, value in config.items() if value is not ...}
        file.write_text(json.dumps(kept), encoding="utf-8")

    return apply


def bias(directory: Path) -> None:
    """Give the attention of an output biases, which its class has in transformers."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, weight in list(tensors.items()):
        if name.endswith(("kv_a_proj_with_mqa.weight", "o_proj.weight")):
            tensors[f"{name.removesuffix('weight')}bias"] = torch.randn(len(weight), generator=generator).to(
                weight.dtype
            )
    save_file(tensors, file, {"format": "pt"})
    edit(attention_bias=True)(directory)


CASES = {
    "no number of experts": Case(
        "llama", _STOCK, "n_routed_experts is null", "n_routed_experts", edit(n_routed_experts=None)
    ),
    "activation": Case("llama", _STOCK, "hidden_act is not silu", "silu", edit(hidden_act="gelu")),
    "epsilon": Case(
        "demo", f"{_STOCK} --latent-norm linear", "a linear latent norm, and rms_norm_eps is not 1e-6",
        DIFFERS, edit(rms_norm_eps=1e-5),
    ),
    "biases": Case("demo", _STOCK, "attention has biases", DIFFERS, bias),
    "rotary table": Case(
        "demo", f"--to mla --kv-budget 50% --container stock --slots allocated {_STATISTICS}",
        "rope_type is not default", DIFFERS,
    ),
    "MLA remote": Case(
        "llama", "--to mla --rank 512 --container remote", "always", "not compatible", trust=True
    ),
    "MLA remote, rope intact": Case(
        "llama", "--to mla --rank 32 --rope intact", "always", "not compatible", trust=True
    ),
    "GQA of GPT-NeoX": Case(
        "gpt_neox", _GQA, "the class is Falcon (GPT-NeoX)", "not compatible"
    ),
    "GQA of Gemma 2": Case(
        "gemma2", _GQA, "a Gemma 2 without hidden_act", "no attribute 'hidden_act'",
        edit(hidden_act=..., attn_logit_softcapping=None),
    ),
    "GQA of Mixtral": Case(
        "mixtral", _GQA, "a Mixtral whose head_dim is not hidden_size / num_attention_heads", "shape mismatch"
    ),
    "GQA of Mixtral, windows": Case(
        "mixtral, 8 heads", _GQA, "a sliding window that SGLang's class does not have", DIFFERS,
        edit(sliding_window=9),
    ),
}  # fmt: skip


def row_of(root: Path, name: str) -> dict[str, Any]:
    """Return the row of an output that breaks a rule."""
    case = CASES[name]
    _, out = fold(root, name, case.source, case.options)
    if case.spoil is not None:
        case.spoil(out)
    rules = ruled(out, case.condition, "sglang")
    tokens = text(json.loads((out / "config.json").read_text(encoding="utf-8")))
    asked = {
        "directory": str(out),
        "dtype": "float32",
        "trust": case.trust,
        "latent": True,
        "multimodal": False,
    }
    served = run_apart(PROBES["sglang"], {**asked, "text": [tokens], "prompt": len(tokens), "steps": STEPS})
    told = served.get("failed") or served.get("lacking") or ""
    is_true = case.says in told
    if not told:
        gap = _gap(out, tokens, served["log_probs"][0], trust=case.trust)
        told = f"it answers, {gap:.1e} nats from transformers"
        is_true = case.says == DIFFERS and gap > WRONG
    row = {"output": name, "condition": case.condition, "rules": rules}
    return row | {"found": " ".join(told.split())[:200], "true": is_true}


def _gap(directory: Path, tokens: list[int], found: list[float], *, trust: bool) -> float:
    """Return the mean difference of log-probabilities from transformers', nats."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=trust
    ).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        known = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return float((torch.tensor(found) - known).abs().mean())


@click.command(cls=Command)
@click.option("--only", default="", help="Outputs whose name contains this; saves nothing.")
def main(only: str) -> None:
    """Break the rules, print the table, and save it in benchmarks/results/sglang-rules-cpu.json."""
    if find_spec("sglang") is None:
        raise InvalidInput("SGLang is not installed in this environment; `make test-sglang` makes its own")
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in CASES:
            if only in name:
                rows.append(row_of(Path(place), name))
                click.echo(f"{name}: {rows[-1]['found']}", err=True)
    finish(rows, "SGLang", "" if only else "sglang-rules-cpu", ("sglang", "transformers"))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
