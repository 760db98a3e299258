"""Parts that run commands, each in a process of its own, as a user runs it."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from .rows import Row, Rows

ROOT = Path(__file__).parents[2]
KINDS = ("all plain", "all online", "attention plain", "attention online", "attention shared")
LOSSES = "--tokens 8192 --vocabulary 128256 --hidden 4096 --repeats 1 --chunks 27"
LARGE = {  # the shape of Llama 3.2 1B
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True,
}  # fmt: skip
LARGE_FOLDS = (
    "--to mla --kv-budget 25%",
    "--to mla --kv-budget 25% --effort quick",
    "--to gqa --kv-budget 25%",
)
FOLDS = {
    "mla 50%": "--to mla --kv-budget 50% --container remote --length 256",
    # the best of twelve settings on SmolLM2-135M (docs/results/pretrained.md)
    "transmla 50%": "--to mla --kv-budget 50% --rope-dim 32 --method transmla:fold2:balance0.5"
    " --container remote",
    "mla 25%": "--to mla --kv-budget 25% --container remote",
    "gqa 1 head": "--to gqa --kv-heads 1",
}
TRAINED = ("mla 50%", "transmla 50%")
WINDOWS = ((256, 32), (2048, 16))  # tokens, and how many
STAGE = {"lr": 2e-4, "tokens": 2**22, "batch_tokens": 32768, "micro_batch": 8}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of the command, with absolute places."""

    work: Path
    source: Path
    text: str
    data: str
    toy: bool


def distil(rows: Rows, asked: Asked) -> None:
    """Measure training steps by `benchmarks.training` and losses by `benchmarks.losses`."""
    student, tokens, length = asked.work / "student", 32768, 4096
    if asked.toy:
        tokens, length = 128, 32
    if rows.attempt(
        "student", partial(_fold, asked.source, "--to mla --kv-budget 25% --calibration none", student)
    ):
        for kind in KINDS[:1] if asked.toy else KINDS:
            words = ["benchmarks.training", str(asked.source), f"--tokens={tokens}", f"--length={length}"]
            words += ["--name=gpu", "--once", *kind.split(), str(student)]
            rows.attempt(f"step {kind}", partial(_object, words))
    losses = "--tokens 32 --vocabulary 64 --hidden 16 --repeats 1 --chunks 10" if asked.toy else LOSSES
    rows.attempt("losses", partial(_object, ["benchmarks.losses", *losses.split(), "--json"]))


def large(rows: Rows, asked: Asked) -> None:
    """Fold a model with random weights: seconds and the GPU's memory."""
    model, out = asked.work / "large", asked.work / "large-fold"
    if not (model / "config.json").exists():  # rows of an earlier call are kept
        rows.rows.pop("model", None)
    if rows.attempt("model", partial(_write_large, model, toy=asked.toy)) is None:
        return
    for options in LARGE_FOLDS:
        more = " --sequences 4 --length 32 --refine 2" if asked.toy else " --jobs 4"
        rows.attempt(f"fold {options}", partial(_fold, model, f"{options} --calibration stdlib{more}", out))


def pretrained(rows: Rows, asked: Asked) -> None:
    """Fold a source, evaluate the folds, and train some of them; the folds share statistics."""
    for label in FOLDS:
        rows.attempt(f"fold {label}", partial(_evaluated, asked, label))
    for label in TRAINED:
        rows.attempt(f"training {label}", partial(_trained, asked, label))


def _write_large(out: Path, *, toy: bool) -> Row:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "demo")
    sizes: dict[str, Any] = dict(LARGE)
    if toy:
        sizes |= {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "head_dim": 16}
        sizes |= {"num_attention_heads": 8, "vocab_size": len(tokenizer)}
    with torch.device("cpu" if toy else "cuda"):
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **ends)).to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {"parameters": sum(weight.numel() for weight in model.parameters()), "config": sizes}


def _fold(source: Path, options: str, out: Path) -> Row:
    """Return seconds of one fold, the GPU's most memory meanwhile, and what kvfold predicted."""
    for left in out.parent.glob(f"{out.name}*"):  # a fold that was stopped would be resumed in less time
        shutil.rmtree(left)
    words = ["kvfold", "convert", str(source), *options.split(), "--json"]
    predicted = _object([*words, "--dry-run"])["fold"]
    start, least, free = time.monotonic(), _free(), _free()
    with _started([*words, "--verify", "none", "--out", str(out)]) as running:
        while running.poll() is None:
            time.sleep(0.2)
            least = min(least, _free())
    seconds = round(time.monotonic() - start, 1)
    if running.returncode:
        raise RuntimeError(f"convert ended with code {running.returncode} after {seconds} s")
    record = json.loads((out / "kvfold.json").read_text(encoding="utf-8"))
    return {
        "options": options, "target": record["target"], "predicted": record["predicted_loss"],
        "fold_seconds": seconds, "gpu_mb": round((free - least) / 1e6), "predicted_cost": predicted,
    }  # fmt: skip


def _evaluated(asked: Asked, label: str) -> Row:
    """Return one fold, and the nats that it loses in windows of every length."""
    out, saved = _place(asked.work, label), asked.work / "statistics.safetensors"
    options = FOLDS[label]
    if asked.toy:
        options = f"{options.removesuffix(' --length 256')} --sequences 4 --length 32 --refine 2"
    options += f" --calibration {saved}" if saved.exists() else f" --save-statistics {saved}"
    row = {**_fold(asked.source, options, out), "losses": {}}
    for window, count in ((64, 2),) if asked.toy else WINDOWS:
        words = ["kvfold", "eval", str(out), "--teacher", str(asked.source), "--text", asked.text, "--json"]
        words += [
            "--window",
            str(window),
            "--max-windows",
            str(count),
            "--dtype",
            "float32",
            "--trust-remote-code",
        ]
        found = _object(words)
        loss = found["suites"]["ppl"]
        row["losses"][str(window)] = {
            "protocol": found["protocol"]["name"],
            "lost": loss["difference"]["mean"],
            "standard_error": loss["difference"]["standard_error"],
            "source_perplexity": loss["teacher"]["perplexity"],
            "kl": found["suites"]["fidelity"]["kl"]["mean"],
        }
    return row


def _trained(asked: Asked, label: str) -> Row:
    """Return the points of one training by KL."""
    fold, window = _place(asked.work, label), 64 if asked.toy else 1024
    out, file = asked.work / f"trained-{fold.name}", asked.work / "recipe.yaml"
    for left in asked.work.glob(f"{out.name}*"):
        shutil.rmtree(left)
    stage: dict[str, Any] = {"name": "kl", "losses": {"kl": 1.0}, "train": "all", "schedule": "wsd", **STAGE}
    evaluation: dict[str, Any] = {"source": asked.text, "seq_len": window, "every": 16, "windows": 32}
    if asked.toy:
        stage |= {"tokens": 512, "batch_tokens": 256, "micro_batch": 2}
        evaluation |= {"every": 1, "windows": 2}
    recipe = {
        "schema": 1, "student": str(fold), "teacher": str(asked.source), "output": str(out),
        "data": {"source": asked.data, "seq_len": window, "seed": 0}, "stages": [stage],
        "evaluate": evaluation, "log_every": 8,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with _started(["kvfold", "distill", str(file)]) as running:
        pass
    if running.returncode:
        raise RuntimeError(f"distill ended with code {running.returncode}")
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"recipe": stage, "points": [json.loads(line) for line in lines]}


def _place(work: Path, label: str) -> Path:
    """Return the directory of a fold."""
    return work / label.replace("%", "").replace(" ", "-")


def _started(words: list[str], **options: Any) -> "subprocess.Popen[str]":
    """Start a module of Python in the repository; its standard output is dropped by default."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, **{"stdout": subprocess.DEVNULL, **options}
    )


def _object(words: list[str]) -> Row:
    """Return the JSON object that a module prints, alone or as its last line."""
    with _started(words, stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate()
    if running.returncode:
        raise RuntimeError(f"{' '.join(words[:2])} ended with code {running.returncode}")
    is_whole = printed.startswith("{")
    found: dict[str, Any] = json.loads(printed if is_whole else printed.splitlines()[-1])
    return found


def _free() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
