"""Warm interpreters end, fail and are killed as new processes are."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ..support.warm_python import warm_python

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="warm interpreters need Linux")


def run(*words: str, **settings: str | Path | dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([warm_python(), *words], capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload, no-any-return]


def test_words_folder_environment_and_streams(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['GIVEN'], sys.argv, sys.stdin.read()); sys.exit('said')"
    ended = run("-c", code, "a", cwd=tmp_path, env={**os.environ, "GIVEN": "7"}, input="in")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, f"{tmp_path} 7 ['-c', 'a'] in\n", "said\n")
    (tmp_path / "script.py").write_text("import sys, beside; print(sys.argv[1:], beside.__name__)")
    (tmp_path / "beside.py").touch()
    assert run(str(tmp_path / "script.py"), "b").stdout == "['b'] beside\n"
    assert run("-m", "script", "c", cwd=tmp_path).stdout == "['c'] beside\n"
    assert "No module named script" in run("-P", "-m", "script", cwd=tmp_path).stderr


def test_it_is_warm_and_has_nothing_of_kvfold() -> None:
    code = "import sys; print([name in sys.modules for name in ('torch', 'transformers', 'kvfold')])"
    assert run("-c", code).stdout == "[True, True, False]\n"


@pytest.mark.parametrize("words", [("-X", "utf8"), ("-I",)])
def test_other_options_are_left_to_the_interpreter(words: tuple[str, ...]) -> None:
    assert run(*words, "-c", "import sys; print('torch' in sys.modules)").stdout == "False\n"


LATE = """
import atexit, sys, threading, time
atexit.register(lambda: print("exit"))
threading.Thread(target=lambda: [time.sleep(0.1), print("thread")]).start()
print("first")
"""


@pytest.mark.parametrize(("ending", "code", "said"), [
    ("", 0, ""),
    ("sys.exit()", 0, ""),
    ("sys.exit(258)", 2, ""),
    ("sys.exit('words')", 1, "words"),
    ("raise ValueError('wrong')", 1, "ValueError: wrong"),
    ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
])  # fmt: skip
def test_it_ends_as_the_interpreter_does(ending: str, code: int, said: str) -> None:
    """Threads end first, then what is registered for the end runs, and all that was printed is there."""
    for python in (warm_python(), sys.executable):
        ended = subprocess.run([python, "-c", LATE + ending], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (code, "first\nthread\nexit\n")
        assert (ended.stderr.splitlines() or [""])[-1] == said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_signal_that_ends_it_is_told(number: signal.Signals) -> None:
    assert run("-c", f"import os; os.kill(os.getpid(), {int(number)})").returncode == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_it_ends_what_it_started(number: signal.Signals) -> None:
    """With all that this started in turn, if it is SIGKILL, which cannot be passed on."""
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    code = f"import os, subprocess, time; child = subprocess.Popen({child!r}); print(os.getpid(), child.pid, flush=True); time.sleep(600)"
    with subprocess.Popen([warm_python(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        fork, child_of_fork = (psutil.Process(int(word)) for word in process.stdout.readline().split())
        process.send_signal(number)
        assert process.wait() == -number
        if number == signal.SIGTERM:
            child_of_fork.kill()
    assert not psutil.wait_procs([fork, child_of_fork], timeout=60)[1]
