"""A fold served by vLLM over HTTP, held against transformers: part of `make test-vllm`.

`python -m benchmarks.vllm_http` starts vLLM's OpenAI server on the bundled checkpoint's folds, with chunked
prefill in pieces of 32 tokens and prefix caching. It asks for the log-probabilities of a batch of prompts, of
which one ends at the last position but one, and for greedy tokens of prompts with a common beginning, twice.
Exit code 1 where an answer is not transformers'.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM

from kvfold.convert.cli import main as convert
from kvfold.core.console import Command, show_table
from kvfold.core.errors import InvalidInput
from kvfold.engines.fresh_process import NEAR
from kvfold.engines.probes.probe_vllm import ENVIRONMENT

from .engine_rows import UPDATE
from .folds import DEMO, HEAD, widen
from .saved_rows import SavedRows

POSITIONS = 256  # of the bundled checkpoint
PIECE = 32  # tokens that are computed at once
LENGTHS = (1, 7, 40, 100, POSITIONS - 1)  # of the prompts of a batch
STEPS = 8
WAIT = 600  # seconds for the server to start
FOLDS = {
    "GQA": "--to gqa --kv-heads 2 --calibration none",
    "MLA stock": "--to mla --rank 512 --engine vllm --container stock --calibration none",
    "MLA remote": "--to mla --rank 512 --engine vllm --container remote --calibration none",
}


@contextmanager
def server(directory: Path, *, latent: bool, remote: bool, log: Path) -> Iterator[str]:
    """Serve a checkpoint on a free port; yield its address once it answers.

    Raises:
        InvalidInput: the server ends, or does not answer in time.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "fold", "--seed", "0"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(POSITIONS)]
    command += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(PIECE), "--max-num-seqs", "8"]
    command += ["--enable-prefix-caching"]
    command += ["--compilation-config", json.dumps({"custom_ops": ["all", "-rotary_embedding"]})]
    command += ["--attention-backend", "CPU_MLA"] if latent else []
    command += ["--trust-remote-code"] if remote else []
    environment = {**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the server's engine is a process of its own
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
        ) as running,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address, running, log)
            yield address
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


def _wait(address: str, running: subprocess.Popen[bytes], log: Path) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < WAIT and running.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
    raise InvalidInput(f"vLLM's server did not answer; its last line is {last[0]}")


def ask(address: str, **request: Any) -> list[dict[str, Any]]:
    """Return the choices of a completion."""
    body = json.dumps({"model": "fold", "temperature": 0, **request}).encode()
    asked = urllib.request.Request(
        f"{address}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=600) as answer:
        choices: list[dict[str, Any]] = json.load(answer)["choices"]
    return sorted(choices, key=lambda choice: choice["index"])


def measure(address: str, model: Any) -> dict[str, Any]:
    """Return how far the server's answers are from a model's.

    Returns:
        `batch`: the largest difference of log-probabilities over a batch of prompts, nats; `prefix`: greedy
        tokens that are equal, of `tokens`, the first time and the second, from the prefix cache.
    """
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    worst = 0.0
    for prompt, choice in zip(
        prompts, ask(address, prompt=prompts, max_tokens=1, echo=True, logprobs=1), strict=True
    ):
        known = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        told = choice["logprobs"]["token_logprobs"][1 : len(prompt)]
        for position, (score, token) in enumerate(zip(told, prompt[1:], strict=True)):
            worst = max(worst, abs(score - float(known[position, token])))
    start = prompts[3]
    continued = [[*start, *prompts[1][:count]] for count in (0, 3, 7)]
    wanted = [
        model.generate(torch.tensor([ids]), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)[
            0, len(ids) :
        ].tolist()
        for ids in continued
    ]
    equal = []
    for _ in range(2):
        choices = ask(address, prompt=continued, max_tokens=STEPS, ignore_eos=True, return_token_ids=True)
        equal.append(
            sum(
                a == b
                for choice, tokens in zip(choices, wanted, strict=True)
                for a, b in zip(choice["token_ids"], tokens, strict=True)
            )
        )
    return {"batch": worst, "prefix": equal, "tokens": STEPS * len(continued)}


@click.command(cls=Command)
@UPDATE
def main(update: bool) -> None:
    """Serve the folds, print the table, and save it in benchmarks/results/vllm-http-cpu.json."""
    if find_spec("vllm") is None:
        raise InvalidInput("vLLM is not installed in this environment; `make test-vllm` makes one of its own")
    versions = {name: version(name) for name in (*packages_distributions()["vllm"], "transformers")}
    settings = {"piece": PIECE, "lengths": list(LENGTHS), "positions": POSITIONS}
    saved = SavedRows("vllm-http-cpu", {"versions": versions, "settings": settings}, update=update)
    rows = []
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        root = Path(place)
        source = widen(DEMO, root / "source", HEAD)
        for name, options in FOLDS.items():
            if saved.find("rows", fold=name, options=options) is not None:
                continue
            out = root / name.replace(" ", "-")
            convert.main([str(source), *options.split(), "--out", str(out)], standalone_mode=False)
            latent, remote = "MLA" in name, "remote" in name
            model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=remote)
            with server(out, latent=latent, remote=remote, log=root / "log.txt") as address:
                found = measure(address, model.eval())
            passed = found["batch"] <= NEAR and set(found["prefix"]) == {found["tokens"]}
            rows.append({"fold": name, "options": options, **found, "passed": passed})
            click.echo(f"{name}: {rows[-1]}", err=True)
            if passed:
                saved.put("rows", rows[-1], "fold")
                if update:
                    saved.write()
    cells = [
        (
            row["fold"],
            f"{row['batch']:.1e}",
            f"{row['prefix']}/{row['tokens']}",
            "ok" if row["passed"] else "FAILS",
        )
        for row in rows
    ]
    show_table("vLLM over HTTP", ("", "log-probabilities", "greedy tokens, twice", ""), cells)
    if not all(row["passed"] for row in rows):
        raise SystemExit(1)
    saved.write()
    click.echo(f"saved in {saved.path}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
