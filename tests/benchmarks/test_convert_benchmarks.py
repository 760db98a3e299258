"""The numbers that the benchmarks of conversion derive from measurements, and the procedure that kvfold is
compared with.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import resident
from benchmarks.convert_memory import flatness, generate
from benchmarks.convert_speed import exponent
from benchmarks.fold_phases import PLACES
from benchmarks.statistics import summarised


def test_exponent() -> None:
    """A power law's exponent, whatever the constants below it do to small sizes."""
    assert exponent([1, 2, 4, 8], [3, 6, 12, 24]) == 1
    assert exponent([1, 2, 4, 8], [100, 4, 16, 64]) == 2


def test_flatness() -> None:
    """The largest size over the smallest, whatever the order of the rows; copies do not count."""
    rows: list[dict[str, Any]] = [
        {"gigabytes": size, "what": what, "peak_mb": peak}
        for what, size, peak in (
            ("mla", 4.0, 150),
            ("mla", 1.0, 100),
            ("mla", 16.0, 110),
            ("cp", 1.0, 5),
            ("cp", 4.0, 9),
        )
    ]
    assert flatness(rows) == {"mla": 1.1}


def test_ratios_are_of_one_round() -> None:
    """A round in which everything took twice as long changes no ratio."""
    cost = {"seconds": 3.0, "cpu_seconds": 2.0, "peak_mb": 10.0}
    slow = {**cost, "seconds": 6.0, "cpu_seconds": 4.0}
    plain = [
        {**one, "seconds": one["seconds"] / 2, "cpu_seconds": one["cpu_seconds"] / 4}
        for one in (cost, slow, cost)
    ]
    row = summarised([cost, slow, cost], plain, tokens=10**6)
    assert (row["times_plain"], row["cpu_times_plain"], row["seconds_per_million_tokens"]) == (2, 4, 3)


def test_resident_procedure_is_exact_at_full_rank(tmp_path: Path) -> None:
    """It decomposes the outputs of the projections: all components together are the source's weights."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    generate(source, 0, hidden=128, layers=2)
    resident.write_words(source, tmp_path / "text.txt", tokens=512)
    steps = resident.fold_resident(source, tmp_path / "text.txt", out, rank=256, sequences=4, length=128)
    assert list(steps) == ["load", "forward", "decompose", "write"]
    theirs, ours = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        wanted = torch.cat([theirs[f"{prefix}{role}_proj.weight"] for role in "kv"]).float()
        given = ours[f"{prefix}up"].float() @ ours[f"{prefix}down"].float()
        assert (given - wanted).norm() < 0.02 * wanted.norm()  # bfloat16 of two factors
    assert torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"])


@pytest.mark.parametrize("name", resident.FOLDS)
def test_every_fold_is_asked_for_the_same_text(name: str, tmp_path: Path) -> None:
    """All but the one by weights alone read the very tokens that the resident procedure reads."""
    size = {"rank": 64, "sequences": 3, "length": 16}
    commands = resident.commands_of(tmp_path, 7, size)
    words = " ".join(commands[name])
    taken = "--sequences 3 --length 16"
    assert (f"--calibration {tmp_path / 'text.txt'} {taken}" in words) == (name != resident.WEIGHTS)
    assert taken in " ".join(commands[resident.RESIDENT])
    assert ("--refine 7" in words) == (name == resident.REFINED)


def test_every_phase_of_a_fold_begins_in_a_function_that_exists() -> None:
    """Clocks are put around functions by their names, which a refactoring may change."""
    for place in PLACES:
        module, _, name = place.rpartition(".")
        assert callable(getattr(import_module(f"kvfold.convert.{module}"), name)), place
