"""Times are what a clock says of the right work, in turns; memory is what tensors take."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from kvfold.checkpoints.cost_blocks import SpeedBlock
from kvfold.core.errors import InvalidInput
from kvfold.eval.cli import main
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites import meter, speed
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.eval.suites.meter import peak_memory, timed
from kvfold.models.causal_lm import load

from ...support.commands import run_main
from ..conftest import Make

CPU = Options(device="cpu")
Seen = list[tuple[Path, tuple[int, ...], int]]


@pytest.fixture(scope="session")
def latent(make: Make) -> Path:
    return make(latent=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """In place of the real one, a clock by which piece of work number n takes n seconds."""
    took: list[float] = []

    def count(device: torch.device, work: Any) -> tuple[Any, float]:
        took.append(len(took) + 1.0)
        return work(), took[-1]

    monkeypatch.setattr(speed, "timed", count)
    return took


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every reading: which model, the ids' shape, and how many tokens its cache held before."""
    readings: Seen = []
    real = speed.read

    def read(loaded: Any, ids_BT: torch.Tensor, cache: Any = None, last: int | None = None) -> Any:
        readings.append((loaded.path, tuple(ids_BT.shape), 0 if cache is None else cache.get_seq_length()))
        return real(loaded, ids_BT, cache, last)

    monkeypatch.setattr(speed, "read", read)
    return readings


def run(student: Path, teacher: Path | None = None, options: Options = CPU, **settings: Any) -> SpeedBlock:
    found = evaluate(
        student, teacher, None, options, suites=("speed",), settings=SuiteSettings.read(settings)
    ).suites["speed"]
    assert isinstance(found, SpeedBlock)
    return found


def test_models_take_turns_and_a_step_reads_one_token_after_it(latent: Path, mha: Path, seen: Seen) -> None:
    run(latent, mha, speed_batch="2", speed_context="8", speed_tokens=3, speed_rounds=4)
    warm = [((2, 8), 0), ((2, 1), 8), ((2, 1), 9)]
    one = [*warm, ((2, 1), 10)]
    order = [(latent, warm), (mha, warm), *[(latent, one), (mha, one)] * 4]
    assert seen == [(path, *step) for path, steps in order for step in steps]


def test_numbers_are_those_of_the_clock(latent: Path, mha: Path, clock: list[float]) -> None:
    (cell,) = run(latent, mha, speed_batch="2", speed_context="8", speed_tokens=3, speed_rounds=3).cells
    # Six pieces of work warm both up; then a round is a prefill and three steps of each model.
    assert clock == [float(n) for n in range(1, 6 + 3 * 2 * 4 + 1)]
    seconds = np.arange(7, 31).reshape(3, 2, 4)
    for number, timing in enumerate((cell.student, cell.teacher)):
        prefill, decode = seconds[:, number, 0], seconds[:, number, 1:].ravel()
        assert timing.prefill.milliseconds.median == 1000 * sorted(prefill)[1]
        assert timing.decode.milliseconds.median == 1000 * sorted(decode)[4]
        assert timing.prefill.tokens_per_second.median == pytest.approx(2 * 8 / sorted(prefill)[1])
        assert timing.decode.tokens_per_second.median == pytest.approx(2 / sorted(decode)[4])
        assert timing.decode.milliseconds.q1 == 1000 * sorted(decode)[2]
        assert timing.decode.milliseconds.q3 == 1000 * sorted(decode)[6]
    assert cell.prefill_speedup.median == pytest.approx(19 / 15)  # of 11/7, 19/15, 27/23
    assert cell.decode_speedup.median == pytest.approx(21 / 17)  # the middle step of the middle round
    assert (cell.rounds, cell.tokens, cell.skipped) == (3, 3, None)


def test_a_smaller_cache_takes_less_memory(make: Make, mha: Path) -> None:
    (cell,) = run(
        make(num_key_value_heads=1), mha, speed_context="48", speed_tokens=4, speed_rounds=3, speed_batch="4"
    ).cells
    saved = 2 * 2 * (4 - 1) * 8 * 4 * 48 * 4  # layers, keys and values, heads, head dim, batch, tokens, bytes
    assert cell.teacher.peak_bytes - cell.student.peak_bytes >= saved
    assert cell.teacher.peak_bytes < 4 * 48 * 4 * 3000


def test_peak_memory_counts_what_is_alive_at_once() -> None:
    x = torch.ones(100, 100)
    with torch.inference_mode(), peak_memory(torch.device("cpu")) as peak:
        y = x @ x
        z = y + 1
        del y
        w = torch.cat([z, z])
        del z
        w[:50].view(-1).add_(1)  # a view, and work in place
    assert peak.bytes == 3 * x.nbytes


def test_every_cell_of_the_sweep_is_there_in_order(mha: Path) -> None:
    cells = run(mha, speed_batch="2,1", speed_context="8,4", speed_tokens=1, speed_rounds=3).cells
    assert [(cell.context, cell.batch) for cell in cells] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert all(cell.teacher is None and cell.decode_speedup is None and cell.student for cell in cells)


def test_contexts_fit_the_models_when_none_are_asked_for(mha: Path, make: Make) -> None:
    assert [cell.context for cell in run(mha, speed_rounds=3).cells] == [64 - 16]
    roomy = make(max_position_embeddings=600)
    assert [cell.context for cell in run(roomy, speed_rounds=3, speed_tokens=1).cells] == [512]


def test_time_that_is_over_skips_cells_shortening_none(mha: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(speed, "monotonic", lambda: float(next(now)))
    first, second = run(
        mha, speed_batch="1,2", speed_context="4", speed_tokens=1, speed_rounds=9, speed_seconds=25.0
    ).cells
    assert (first.rounds, first.skipped) == (3, None)
    assert second.skipped == "--speed-seconds 25 were over"
    assert second.student is None


def test_a_cell_that_does_not_fit_in_memory_is_skipped(mha: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = speed.read

    def read(loaded: Any, ids_BT: torch.Tensor, cache: Any = None, last: int | None = None) -> Any:
        if len(ids_BT) > 1:
            raise torch.OutOfMemoryError("no")
        return real(loaded, ids_BT, cache, last)

    monkeypatch.setattr(speed, "read", read)
    fits, large = run(mha, speed_batch="1,2", speed_context="4", speed_tokens=1, speed_rounds=3).cells
    assert (fits.skipped, large.skipped) == (None, "out of memory")


@pytest.mark.parametrize(("batch", "remedy"), [
    ("2", "use a smaller --speed-batch or a smaller --speed-context"),
    ("1", "use a smaller --speed-context"),
])  # fmt: skip
def test_a_full_memory_of_the_system_names_the_options_of_this_suite(
    mha: Path, monkeypatch: pytest.MonkeyPatch, batch: str, remedy: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(speed, "read", full)
    with pytest.raises(InvalidInput, match=f"^this machine has too little memory; {remedy}$"):
        run(mha, speed_batch=batch, speed_context="4", speed_tokens=1, speed_rounds=3)


def test_one_at_a_time_measures_both_and_pairs_nothing(latent: Path, mha: Path, seen: Seen) -> None:
    found = run(
        latent,
        mha,
        Options(device="cpu", one_at_a_time=True),
        speed_context="4",
        speed_tokens=1,
        speed_rounds=3,
    )
    (cell,) = found.cells
    assert not found.interleaved
    assert cell.student is not None
    assert cell.teacher is not None
    assert cell.decode_speedup is None
    assert [path for path, *_ in seen] == [latent] * 8 + [mha] * 8


def test_on_cuda_events_on_the_device_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

        def elapsed_time(self, other: "Event") -> float:
            return 250.0  # milliseconds

    monkeypatch.setattr(meter.torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(meter.torch.cuda, "Event", Event)
    monkeypatch.setattr(meter.torch.cuda, "synchronize", lambda: told.append("synchronize"))
    result, seconds = timed(torch.device("cuda", 0), lambda: told.append("work") or "done")  # type: ignore[func-returns-value]
    assert (result, seconds) == ("done", 0.25)
    assert told == ["synchronize", "record", "work", "record", "wait"]


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"speed_context": "60"},
     "--speed-context 60 and 16 decoded tokens exceed the 64 positions of .*; use 48"),
    ({"speed_context": "4,x"},
     "speed_context is '4,x'; it should be whole numbers from 1, separated by commas"),
    ({"speed_batch": f"1,{10**30}"},
     "speed_batch is '1,10+'; it should be whole numbers of at most 1,000,000,000"),
    ({"speed_batch": "9" * 5000}, "it should be whole numbers of at most 1,000,000,000"),
    ({"speed_seconds": float("nan")}, "speed_seconds is nan; it should be"),
    ({"speed_batch": "0"}, "speed_batch is '0'; it should be whole numbers"),
    ({"speed_batch": ""}, "speed_batch is ''; it should be whole numbers"),
    ({"speed_tokens": 64}, "--speed-tokens 64: .* has 64 positions; use fewer"),
])  # fmt: skip
def test_mistakes_are_one_sentence(mha: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        run(mha, **settings)


def test_the_report_has_every_number_and_an_interrupted_sweep_goes_on(
    latent: Path, mha: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "eval.json"
    command = f"{latent} --teacher {mha} --suite speed --device cpu --speed-batch 1,2".split()
    command += ["--speed-context", "8", "--speed-tokens", "2", "--speed-rounds", "3", "--out", str(out)]
    real = speed._round

    def stop(loaded: Any, ids_BC: torch.Tensor, tokens: int) -> Any:
        if len(ids_BC) == 2:
            raise KeyboardInterrupt
        return real(loaded, ids_BC, tokens)

    monkeypatch.setattr(speed, "_round", stop)
    assert CliRunner().invoke(main, command).exit_code != 0
    journal = tmp_path / "eval.json.partial" / "journal.jsonl"
    name, kept, _ = json.loads(journal.read_text().splitlines()[1])
    monkeypatch.setattr(speed, "_round", real)
    result = run_main("eval", *command, "--assert", "speed.cells.1.decode_speedup.median>0")
    assert "decode, 2 x 8 tokens, ms/step" in result.stdout
    first, second = json.loads(out.read_text())["suites"]["speed"]["cells"]
    assert name == "speed/student+teacher/1x8"
    assert first["student"]["prefill"]["milliseconds"]["median"] == pytest.approx(
        1000 * float(np.median(kept["student"]["prefill"]))
    )
    assert second["teacher"]["peak_bytes"] > first["teacher"]["peak_bytes"] > 0


def test_logits_of_the_last_token_alone_are_formed(mha: Path) -> None:
    loaded = load(mha, CPU)
    ids_BT = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        whole, _ = speed.read(loaded, ids_BT)
        last, cache = speed.read(loaded, ids_BT[:, :4], last=1)
        after, _ = speed.read(loaded, ids_BT[:, 4:], cache)
    assert last.shape == (2, 1, 258)
    torch.testing.assert_close(last, whole[:, 3:4])
    torch.testing.assert_close(after, whole[:, 4:])
