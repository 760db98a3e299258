"""Two processes under accelerate's launcher find what one finds, and end together."""

import json
import os
import subprocess
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ..support.warm_python import warm_python
from .conftest import Make, run

LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
          "--mixed_precision", "no",
          "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip


def launch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), *LAUNCH, "-m", "kvfold", "eval", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)


def test_two_processes_find_as_one(mha: Path, other: Path, file: Path, tmp_path: Path) -> None:
    arguments = f"{mha} --teacher {other} --text {file} --window 32 --batch-size 4 --json".split()
    alone = run(*arguments, code=0)
    assert json.loads(alone.stdout)["suites"]["fidelity"]["kl"]["mean"] > 0
    for number, more in enumerate(([], ["--teacher-cache", tmp_path / "states"])):
        out = tmp_path / f"eval{number}.json"
        both = launch(*arguments, *more, "--out", out, "--assert", "kl.mean>0")
        assert both.returncode == 0, both.stderr
        assert json.loads(both.stdout) == json.loads(out.read_text()) == json.loads(alone.stdout)
    files = (tmp_path / "states").glob("hidden-*")
    assert sum(len(load_file(file)["hidden"]) for file in files) == 19


def test_a_mistake_that_one_process_meets_ends_all(make: Make, file: Path) -> None:
    broken = make(seed=4)
    tensors = load_file(broken / "model.safetensors")
    (number,) = AutoTokenizer.from_pretrained(broken)("b", add_special_tokens=False).input_ids
    tensors["model.embed_tokens.weight"][number].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    word = file.with_name("word.txt")
    word.write_text("a" * 140 + "b" + "a" * 40)  # in the second batch, which the second process reads
    both = launch(broken, "--text", word, "--window", "32", "--batch-size", "4", "--suite", "ppl")
    assert (both.stdout, both.returncode != 0) == ("", True)
    sentence = (
        "gives logits that are not finite in window 4; the first output that is not finite is that "
        "of model.embed_tokens"
    )
    assert both.stderr.count(sentence) == 1


def test_an_out_that_exists_ends_all(mha: Path, file: Path) -> None:
    both = launch(mha, "--text", file, "--window", "32", "--out", file)
    assert both.returncode != 0
    assert both.stderr.count(f"--out {file} exists; name another file") == 1
