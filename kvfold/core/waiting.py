"""The way in which threads of one computation wait for each other, on a machine that is busy.

OpenMP's threads wait by spinning. Where another process takes a core, all of them spin until the thread that
lost it has it again: two threads next to other work took three to eight times the CPU time of one
(docs/notes/time-and-memory.md). Threads that wait passively do not. It changes no number. On a quiet machine
spinning is left as it is, since threads wake faster from it.

No heavy import here: `--help` goes through this module.
"""

import os
import sys
from pathlib import Path

LOAD = Path("/proc/loadavg")  # Linux
# Any of them says how OpenMP's threads wait.
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_passively_if_busy() -> None:
    """Let OpenMP's threads wait passively where other processes leave fewer free cores than threads need.

    This has an effect before torch is imported, and in processes that are started later. A choice of the user
    is kept: a variable of `POLICIES`, or one thread.
    """
    if "torch" in sys.modules or any(name in os.environ for name in POLICIES):
        return
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if is_busy(int(threads) if threads.isdecimal() else cores, cores):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def is_busy(threads: int, cores: int) -> bool:
    """Return whether other processes leave fewer free cores than some threads need.

    They count if they run now and did so during the last minute: the end of a former command keeps the mean
    load high, and a moment's work is soon over. Where the system does not tell, it is not busy.

    Args:
        threads: of this process.
        cores: of the machine.
    """
    try:
        mean, _, _, running, _ = LOAD.read_text(encoding="ascii").split()
        others = min(round(float(mean)), int(running.partition("/")[0]) - 1)  # this process runs too
    except (OSError, ValueError):
        return False
    return threads > 1 and others + threads > cores
