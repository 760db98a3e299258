"""Environment of every test."""

import os
import signal
import sys

import pytest

# Tiny matrices: threads cost more than they bring, and pytest-xdist runs one process a core already.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Expected numbers are a CPU's, and processes that tests start would share one GPU. KVFOLD_TEST_GPU=1 shows it.
if os.environ.get("KVFOLD_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# A shell starts the background jobs of a script with SIGINT ignored, and Python then sets no handler: tests
# that interrupt a command would not stop it, nor would processes that they start, which inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def small_parts() -> None:
    """Tokenise long texts in smaller parts: most tests read their beginning alone, and parts change no token
    (tests/texts/test_token_parts.py)."""
    from kvfold.texts import token_parts

    token_parts.PART = 2**14


@pytest.fixture
def warm_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` run its probe, and files be read, in forked processes: for tests not about their start."""
    from .support.warm_python import warm_python

    monkeypatch.setattr(sys, "executable", warm_python())
