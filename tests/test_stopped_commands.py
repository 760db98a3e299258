"""Commands that are stopped before every kind of operation on their files end in the same bits."""

from pathlib import Path

import pytest

from .support.commands import run_main
from .support.stops import bits, run_to_the_end
from .support.tiny import make
from .support.tokenizers import save_tokenizer
from .support.towers import make_multimodal
from .support.warm_server import WarmServer

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="there is no /proc, which tells where a directory is"
)
_SERVER = WarmServer(
    [__name__, "transformers.models.llava.modeling_llava", "kvfold.fold_run", "kvfold.eval.run"]
)
FOLD = ("--to", "gqa", "--kv-heads", "2", "--calibration", "none", "--verify", "none")
OPERATIONS = {
    "convert": (
        "os.mkdir out.partial", "os.rename out.partial/journal.jsonl.partial", "open journal.jsonl",
        "open model-of.safetensors", "os.rename out.partial/model", "os.remove out.partial/lock",
        "os.rmdir out.partial",
    ),
    "tower": (
        "os.rename out.partial/text.partial/model", "os.rename out.partial/whole/out",
        "os.remove out.partial/tower/config.json",
    ),
    "eval": ("os.rename e.json.partial/eval.json", "os.remove e.json.partial/journal.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("command", OPERATIONS)
def test_a_stopped_command_ends_in_the_same_bits(command: str, tmp_path: Path) -> None:
    whole, work = tmp_path / "whole", tmp_path / "work"
    source = tmp_path / "source"
    if command == "tower":
        make_multimodal(source, "llava")
    else:
        save_tokenizer(make(source, num_hidden_layers=2, vocab_size=300))
    text = tmp_path / "text.txt"
    text.write_text("one line and another, of which two are read\n" * 9)
    for place in (whole, work):
        place.mkdir()
        (place / "mine.partial").write_text("mine")
        words = ["convert", str(source), *FOLD, "--shard-size", "20KB", "--out", str(place / "out")]
        if command == "eval":
            words = ["eval", str(source), "--text", str(text), "--window", "16", "--max-windows", "4"]
            words += ["--batch-size", "2", "--suite", "ppl,cache", "--out", str(place / "e.json")]
        if place == whole:
            run_main(*words)
    kinds = run_to_the_end(_SERVER, words, work, tmp_path / "told")
    assert bits(work) == bits(whole)
    assert set(OPERATIONS[command]) <= set(kinds), kinds
