"""Threads of a command wait passively where other processes run, and as the user says."""

import os
import sys
from pathlib import Path

import pytest

from kvfold.core import waiting


@pytest.mark.parametrize(("load", "given", "found"), [
    ("3.10 2.00 1.00 4/200 999\n", {}, "PASSIVE"),
    ("0.10 2.00 1.00 4/200 999\n", {}, None),  # others began this moment
    ("3.10 2.00 1.00 1/200 999\n", {}, None),  # others have ended
    ("soon", {}, None),
    (None, {}, None),  # another system
    ("2.20 2.00 1.00 3/200 999\n", {"OMP_NUM_THREADS": "1"}, None),
    ("2.20 2.00 1.00 3/200 999\n", {"OMP_NUM_THREADS": "2"}, None),  # of four cores, two of which are free
    ("2.20 2.00 1.00 3/200 999\n", {"OMP_NUM_THREADS": "3"}, "PASSIVE"),
    ("2.20 2.00 1.00 3/200 999\n", {"GOMP_SPINCOUNT": "1000"}, None),
    ("2.20 2.00 1.00 3/200 999\n", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
])  # fmt: skip
def test_busy_machines_are_waited_on_passively(
    load: str | None,
    given: dict[str, str],
    found: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has four cores and this /proc/loadavg; a choice of the user is kept."""
    file = tmp_path / "loadavg"
    if load is not None:
        file.write_text(load, encoding="ascii")
    for name in ("OMP_NUM_THREADS", *waiting.POLICIES):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(waiting, "LOAD", file)
        patch.setattr(os, "cpu_count", lambda: 4)
        patch.delitem(sys.modules, "torch", raising=False)
        for name, value in given.items():
            patch.setenv(name, value)
        if "OMP_WAIT_POLICY" not in given:
            patch.setenv("OMP_WAIT_POLICY", "")  # so that it is restored
            patch.delenv("OMP_WAIT_POLICY")
        waiting.wait_passively_if_busy()
        assert os.environ.get("OMP_WAIT_POLICY") == found
