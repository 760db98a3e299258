"""The KL that a fold's record holds is that of the whole output on calibration text that was held back."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.checkpoints.record import read_record
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.write import joint_loss

from ...support.folds import convert
from ...support.tiny import make

SOME = ("--sequences", "16", "--length", "16", "--refine", "0")


@pytest.mark.parametrize("container", ["stock", "remote"])
def test_the_kl_is_that_of_source_and_output_on_the_last_sequences(tmp_path: Path, container: str) -> None:
    source, kept = make(tmp_path / "source"), tmp_path / "kept.safetensors"
    options = ("--to", "mla", "--kv-budget", "25%", "--container", container, "--save-statistics", str(kept))
    done = convert(source, *SOME, *options)
    assert done.exit_code == 0, done.output
    ids_BT = Statistics.load(kept).ids_BT[-2:]
    with torch.inference_mode():
        wanted, given = (
            AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="float32")
            .eval()(input_ids=ids_BT)
            .logits.log_softmax(-1)
            for path in (source, tmp_path / "out")
        )
    kl = float((wanted.exp() * (wanted - given)).sum(-1).mean())
    record = read_record(tmp_path / "out")
    assert record is not None
    assert record["measured_kl"] == {"kl": pytest.approx(kl, rel=1e-3), "sequences": 2, "length": 16}
    assert kl > 1e-5
    assert f"KL {kl:.4f} on 32 held-back tokens of its calibration text" in " ".join(done.output.split())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"the predictions of the whole fold were {kl:.4f} nats" in card


@pytest.mark.parametrize("options", [("--calibration", "none"), SOME])
def test_nothing_is_measured_without_text_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    source = make(tmp_path / "source")
    monkeypatch.setattr(joint_loss, "free_bytes", lambda: 1000)
    done = convert(source, "--to", "gqa", "--kv-heads", "2", *options)
    assert done.exit_code == 0, done.output
    assert "measured_kl" not in (read_record(tmp_path / "out") or {})
    assert "held-back tokens" not in done.output
