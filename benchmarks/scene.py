"""Sound files of every kind that kvfold reads, made by kvfold itself, for `hostile` and `kills`."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from kvfold.cli import main
from tests.support.quantised import FORMATS, quantise
from tests.support.tiny import make
from tests.support.towers import make_multimodal

GQA = ("--to", "gqa", "--kv-heads", "2")
MLA = ("--to", "mla", "--rank", "full")
LOSSLESS = ("--calibration", "none")
EVALUATED = ("--suite", "ppl,fidelity", "--window", "16", "--max-windows", "2", "--device", "cpu")
CALIBRATED = ("--sequences", "2", "--length", "16", "--refine", "0")
SECRET = "the secret key"
TOWER = "llava-text"  # the text tower of llava, folded alone
_SIZES: dict[str, Any] = {
    "vocab_size": 258, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 257,
}  # fmt: skip


def build(scene: Path) -> None:
    """Write the sound files into a directory.

    Args:
        scene: must not exist; the records in it name this path.
    """
    scene.mkdir(parents=True)
    (scene / "secret.key").write_text(SECRET)
    _texts(scene)
    for name, options in (("source", {}), ("sharded", {"shard_size": "20KB"})):
        _source(scene / name, **options)
    run("convert", scene / "source", *GQA, *LOSSLESS, "--out", scene / "fold")
    remote = ("--to", "mla", "--kv-budget", "50%", "--container", "remote")
    run("convert", scene / "source", *remote, *LOSSLESS, "--out", scene / "remote")
    run("convert", scene / "source", *MLA, *LOSSLESS, "--out", scene / "latent")
    taken = (
        "--calibration",
        scene / "text.jsonl",
        *CALIBRATED,
        "--save-statistics",
        scene / "taken.safetensors",
    )
    run("convert", scene / "source", *GQA, *taken, "--out", scene / "calibrated")
    shutil.rmtree(scene / "calibrated")
    _recipe(scene)
    run("distill", scene / "recipe.yaml")
    (scene / "trained").rename(scene / "distilled")
    run(
        "eval",
        scene / "fold",
        "--text",
        scene / "text.txt",
        *EVALUATED,
        "--out",
        scene / "fold" / "eval.json",
    )
    run(
        "eval", scene / "distilled", "--text", scene / "text.txt", *EVALUATED,
        "--teacher-cache", scene / "cache", "--out", scene / "distilled" / "eval.json",
    )  # fmt: skip
    stop_at("config.json", "convert", scene / "source", *GQA, *LOSSLESS, "--out", scene / "out")
    stop_at(
        "e.json", "eval", scene / "fold", "--text", scene / "text.txt", *EVALUATED, "--out", scene / "e.json"
    )
    stop_at("step-00000003", "distill", scene / "recipe.yaml")  # two states are whole


def build_others(scene: Path) -> None:
    """Add a quantised and a multimodal source, and the text tower of the latter, folded alone."""
    form = FORMATS["compressed int4 with zeros"]
    plain = make(scene / "plain", form.family, equal_heads=True, intermediate_size=64, **_SIZES)
    quantise(plain, scene / "quantised", form)
    make_multimodal(scene / "llava", "llava", **_SIZES)
    for name in ("quantised", "llava"):
        for file in ("tokenizer.json", "chat_template.jinja"):
            (scene / name / file).unlink(missing_ok=True)
        save_tokenizer(scene / name)
    shutil.rmtree(plain)
    shutil.rmtree(scene / "quantised-twin", ignore_errors=True)
    run("convert", scene / "llava", *GQA, *LOSSLESS, "--text-only", "--out", scene / TOWER)


def run(*words: Any) -> None:
    """Run a command that must succeed."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, (words, done.output, done.exception)


def stop_at(name: str, *words: Any) -> None:
    """Run a command in a process of its own, and kill it before anything that it writes has a name."""
    child = os.fork()
    if child == 0:

        def stop(event: str, arguments: Any) -> None:
            named = arguments[1] if event == "os.rename" else arguments[0] if event == "open" else ""
            reads = event == "open" and not (isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE)
            if isinstance(named, str | os.PathLike) and Path(named).name == name and not reads:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(stop)
        CliRunner().invoke(main, [str(word) for word in words])
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), words


def _texts(scene: Path) -> None:
    draw = random.Random(0)
    words = ["key", "value", "cache", "head", "fold", "rank", "layer", "query", "token", "window"]
    documents = [" ".join(draw.choices(words, k=40)) for _ in range(12)]
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (scene / "text.jsonl").write_text(lines)
    others = ["entry", "lost", "found", "again", "slot"]
    (scene / "text.txt").write_text(" ".join(draw.choices(others, k=60)))
    (scene / "rows.json").write_text(json.dumps({"text": documents}))
    _parquet(scene / "text.parquet", documents)
    import gzip

    (scene / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def _parquet(file: Path, documents: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file)


def _source(directory: Path, **options: Any) -> None:
    """Write a checkpoint with equal heads, of which a fold to fewer loses nothing."""
    make(directory, equal_heads=True, **_SIZES, **options)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (directory / name).unlink()
    save_tokenizer(directory)
    (directory / "generation_config.json").write_text(
        '{"bos_token_id": 0, "eos_token_id": 257, "do_sample": true}'
    )
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    (directory / "LICENSE").write_text("My terms")


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer of bytes with `<s>` in front and one more entry."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        directory
    )


def _recipe(scene: Path) -> None:
    stage = {"name": "kl", "tokens": 96, "batch_tokens": 32, "micro_batch": 2, "lr": 1e-3}
    recipe = {
        "schema": 1, "student": str(scene / "fold"), "output": str(scene / "trained"),
        "data": {"source": str(scene / "text.jsonl"), "seq_len": 16}, "stages": [stage],
        "evaluate": {"source": str(scene / "text.txt"), "every": 1, "windows": 2},
        "save": {"every": 1}, "log_every": 1, "precision": "fp32", "device": "cpu",
    }  # fmt: skip
    (scene / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    request = {"model": str(scene / "source"), "to": "gqa", "kv_heads": 2, "calibration": "none"}
    (scene / "request.yaml").write_text(yaml.safe_dump(request))


def recipe_of_all_stages(scene: Path, work: Path) -> Path:
    """Write a recipe with every kind of stage, a teacher's cache, and a choice of the best weights."""
    stage = {"tokens": 64, "batch_tokens": 32, "micro_batch": 2, "lr": 1e-3}
    align = {**stage, "losses": {"attention_output": 1.0}, "train": "attention"}
    stages = [
        {**align, "name": "stream", "mode": "stream"},
        {**align, "name": "align"},
        {**stage, "name": "kl"},
    ]
    recipe = yaml.safe_load((scene / "recipe.yaml").read_text())
    recipe |= {
        "output": str(work / "out"), "teacher_cache": str(work / "cache"), "stages": stages,
        "evaluate": {"source": str(scene / "text.txt"), "every": 1, "windows": 2, "keep": "best"},
        "save": {"every": 1, "keep": 1, "keep_stages": True},
    }  # fmt: skip
    file = scene / "stages.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file
