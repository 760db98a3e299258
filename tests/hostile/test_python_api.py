"""Arguments of the Python API that have the wrong type or are damaged: each is an `InvalidInput`."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.core.errors import LONGEST, InvalidInput

VALUES: dict[str, Any] = {
    "number": 7, "bytes": b"x", "list": [1], "object": object(), "null character": "a\0b", "empty": "",
    "long": "x" * 5000,
}  # fmt: skip
CALLS: dict[str, Callable[[Path, Any], object]] = {
    "fold source": lambda source, value: kvfold.fold(value, kvfold.MQA(), out=source / "out"),
    "fold target": lambda source, value: kvfold.fold(source, value),
    "fold size": lambda source, value: kvfold.fold(source, kvfold.MLA(rank=value)),
    "fold out": lambda source, value: kvfold.fold(source, kvfold.MQA(), calibration="none", out=value),
    "fold engines": lambda source, value: kvfold.fold(source, kvfold.MQA(), engines=value),
    "fold text": lambda source, value: kvfold.fold(source, kvfold.MQA(), calibration=value),
    "fold option": lambda source, value: kvfold.fold(source, kvfold.MQA(), refine=value),
    "plan source": lambda source, value: kvfold.plan(value),
    "plan context": lambda source, value: kvfold.plan(source, context=value),
    "plan engines": lambda source, value: kvfold.plan(source, engines=value),
    "train": lambda source, value: kvfold.train(value),
    "evaluate directory": lambda source, value: kvfold.evaluate(value, text="stdlib"),
    "evaluate text": lambda source, value: kvfold.evaluate(source, text=value),
    "evaluate suites": lambda source, value: kvfold.evaluate(source, text="stdlib", suites=value),
    "evaluate teacher": lambda source, value: kvfold.evaluate(source, text="stdlib", teacher=value),
    "evaluate window": lambda source, value: kvfold.evaluate(source, text="stdlib", window=value),
    "evaluate device": lambda source, value: kvfold.evaluate(source, text="stdlib", device=value),
    "verify directory": lambda source, value: kvfold.verify(value),
    "verify engines": lambda source, value: kvfold.verify(source, engines=value, run=False),
    "verify source": lambda source, value: kvfold.verify(source, source=value),
    "publish directory": lambda source, value: kvfold.publish(value, "org/x", dry_run=True),
    "publish repository": lambda source, value: kvfold.publish(source, value, dry_run=True),
    "migrate source": lambda source, value: kvfold.migrate(value, "gqa", until="kl<1", out="out"),
    "migrate to": lambda source, value: kvfold.migrate(source, value, until="kl<1", out="out"),
    "migrate until": lambda source, value: kvfold.migrate(source, "gqa", until=value, out="out"),
    "migrate text": lambda source, value: kvfold.migrate(source, "gqa", until="kl<1", out="out", text=value),
    "migrate settings": lambda source, value: kvfold.migrate(
        source, "gqa", until="kl<1", out="out", settings=value
    ),
    "report directories": lambda source, value: kvfold.report(value, source / "page.html"),
    "report out": lambda source, value: kvfold.report([source], value),
    "absorb": lambda source, value: kvfold.absorb(value),
}
# Numbers are numbers here, and a plan's context is at least 1.
RIGHT = {
    ("plan context", "number"), ("fold size", "number"), ("fold option", "number"), ("evaluate window", "number"),
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument(source: Path, call: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    if (call, value) in RIGHT:
        pytest.skip("this is right")
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(InvalidInput) as caught:
        CALLS[call](source, VALUES[value])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= LONGEST
    assert sorted(source.parent.rglob("*")) == before
    assert capfd.readouterr().out == ""


def test_an_error_of_the_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvfold.fold_run.carry_out", full)
    with pytest.raises(InvalidInput, match="cannot be written: No space left on device; make room"):
        kvfold.fold(source, kvfold.GQA(kv_heads=2), out=tmp_path / "out", calibration="none")


def test_a_sentence_keeps_its_beginning_and_its_end() -> None:
    sentence = str(InvalidInput(f"x is {'a' * 10_000}; give another"))
    assert len(sentence) == LONGEST
    assert sentence.startswith("x is aaa")
    assert sentence.endswith("aaa; give another")
