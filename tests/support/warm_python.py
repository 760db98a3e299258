"""An interpreter whose processes begin with torch and transformers imported: `warm_python()`.

A small program hands its arguments, environment, folder and streams to a server that has imported them and
forks; signals and the exit status are passed on, and the fork dies with the program. What a fork cannot do as
a new process would is left to the real interpreter. Not for tests of what a process imports.
"""

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

MODULES = (
    "torch.distributed.run", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
    "accelerate.commands.launch", "datasets",
)  # fmt: skip
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Variables with these beginnings are read while modules are imported. The cache of code is set for each fork.
IMPORTED = (
    "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "TRITON_", "PYTHONHASHSEED",
    "PYTHONWARNINGS",
)  # fmt: skip
SET_LATER = ("HF_MODULES_CACHE", "TORCHINDUCTOR_CACHE_DIR")  # the second by torch itself
# Read when a group of processes begins, not before: torchrun sets them for each of its workers.
OF_WORKERS = ("TORCHELASTIC_", "TORCH_NCCL_")
LENGTH = 8  # bytes of a number, before a message and for an exit status


def _imported(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(IMPORTED) and not name.startswith(OF_WORKERS) and name not in SET_LATER
    }


_server: subprocess.Popen[bytes] | None = None
_place = ""
PROGRAM = """#!{python} -IS
import sys
sys.path.append({folder!r})
from warm_python import ask
ask({address!r}, {python!r})
"""


def warm_python() -> str:
    """Return the program's path (without Linux, the interpreter's); a first call starts the server."""
    global _server, _place
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    if _server is None:
        _place = tempfile.mkdtemp(prefix="warm-")
        _server = _start(_place)
    return os.path.join(_place, "python")


def _start(place: str) -> subprocess.Popen[bytes]:
    """Write the program and start the server, which ends with this process: its input does."""
    address, program = os.path.join(place, "socket"), os.path.join(place, "python")
    with open(program, "w") as file:
        folder = os.path.dirname(os.path.abspath(__file__))
        file.write(PROGRAM.format(python=sys.executable, folder=folder, address=address))
    os.chmod(program, 0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-P", __file__, str(listener.fileno())]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], cwd=place)


# ---- the program -----------------------------------------------------------------------------------------


def ask(address: str, python: str) -> None:
    """Have a command line run by the server, and end as it ends."""
    words = sys.argv[1:]
    if _parts(words) is None:
        os.execv(python, [python, *words])
    asked = json.dumps(
        {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "program": sys.argv[0]}
    ).encode()
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    socket.send_fds(link, [len(asked).to_bytes(LENGTH, "big")], [0, 1, 2])
    link.sendall(asked)
    fork = _number(link)
    if not fork:
        os.execv(python, [python, *words])
    for number in PASSED_ON:
        signal.signal(number, lambda given, _: os.kill(fork, given))
    code = os.waitstatus_to_exitcode(_number(link))
    if code < 0:
        with suppress(OSError):  # SIGKILL has nothing but its default
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _number(link: socket.socket) -> int:
    return int.from_bytes(link.recv(LENGTH, socket.MSG_WAITALL), "big")


def _parts(words: list[str]) -> tuple[set[str], str, list[str]] | None:
    """Return options, what is run ("-c", "-m" or a file) and the words from there; None: not known here."""
    options = set()
    for place, word in enumerate(words):
        if word in ("-c", "-m") or not word.startswith("-"):
            return options, word, words[place:]
        if word not in ("-u", "-P"):
            return None
        options.add(word)
    return None


# ---- the server ------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> Callable[[], Any]:
    """Import modules and fork for each program that asks; return, in a fork, what it shall run."""
    at_start = _imported(dict(os.environ))  # before modules add their own
    for module in MODULES:
        import_module(module)
    gc.freeze()  # otherwise collections of each fork go through, and copy, all objects of these modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        link, _ = listener.accept()
        if os.fork():
            link.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if (task := _keep(link, at_start)) is not None:
            return task
        os._exit(0)
    shutil.rmtree(os.getcwd())
    os._exit(0)


def _keep(link: socket.socket, at_start: dict[str, str]) -> Callable[[], Any] | None:
    """Fork for a program and tell it how the fork ends; return the fork's task, in the fork."""
    import psutil  # the program begins without packages

    head, streams, _, _ = socket.recv_fds(link, LENGTH, 3)
    asked = json.loads(link.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    if _imported(asked["environment"]) != at_start:
        link.sendall(bytes(LENGTH))
        return None
    if not (fork := os.fork()):
        link.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return _task(asked)
    for stream in streams:
        os.close(stream)
    link.sendall(fork.to_bytes(LENGTH, "big"))
    ended = os.pidfd_open(fork)
    if ended not in select.select([link, ended], [], [])[0]:
        # The program is gone. Whoever killed it with its children could not see the fork's.
        for member in (psutil.Process(fork), *psutil.Process(fork).children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                member.kill()
    status = os.waitpid(fork, 0)[1]
    with suppress(OSError):
        link.sendall(status.to_bytes(LENGTH, "big"))
    return None


def _task(asked: dict[str, Any]) -> Callable[[], Any]:
    """Make this process look like one that the program's command line started."""
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    parts = _parts(asked["words"])
    assert parts is not None
    options, run, words = parts
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if "HF_MODULES_CACHE" in os.environ:
        hub.HF_MODULES_CACHE = dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
    # The server's own objects believe that its streams are still there: a file is one that can seek.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1 if "-u" in options else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace")
    sys.executable = asked["program"]
    sys.argv = words[1:] if run == "-m" else words if run not in ("-c", "-m") else ["-c", *words[2:]]
    first = "" if run == "-c" else os.getcwd() if run == "-m" else os.path.dirname(os.path.abspath(run))
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [*([] if "-P" in options else [first]), *paths]
    if run == "-m":
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    if run == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        return lambda: exec(compile(words[1], "<string>", "exec"), main.__dict__)
    return lambda: runpy.run_path(run, run_name="__main__")


def end_with(task: Callable[[], Any]) -> None:
    """Run a task and end as an interpreter does, but without taking its modules apart: that is 1.8 CPU seconds."""
    code: Any = 0
    try:
        task()
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        gc.unfreeze()
        raise
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        gc.unfreeze()
        sys.exit(code)  # it says so, and has a code for it
    os._exit((code or 0) & 255)


if __name__ == "__main__":
    end_with(serve(socket.socket(fileno=int(sys.argv[1]))))
