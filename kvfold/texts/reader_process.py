"""The process that reads untrusted rows for `document_rows`: a request on its input, frames on its output."""

import os
import pickle
import sys
import traceback
from typing import NoReturn

from ..core.memory import system_bytes
from ..core.system_calls import limit_memory
from .document_rows import UNREADABLE, Frame, explain, open_rows


def main() -> None:
    """Read one request, write its batches, and last how they ended."""
    request, source = pickle.load(sys.stdin.buffer)
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # no library's print comes between the frames

    def write(frame: Frame) -> None:
        pickle.dump(frame, frames, protocol=pickle.HIGHEST_PROTOCOL)
        frames.flush()

    try:
        from datasets import config

        # Otherwise `datasets` 5 sleeps five seconds behind every shuffled Parquet file, so that Arrow's
        # threads are gone when Python shuts down. This process ends without that.
        config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
        limit_memory(system_bytes())  # now that `datasets` has been imported
        for columns in open_rows(request):
            write(("rows", dict(columns)))
        write(("end", None))
    except BrokenPipeError:  # enough was read
        os._exit(0)
    except (*UNREADABLE, MemoryError) as error:
        write(("refusal", str(explain(error, source))))
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            _end_with(error)
        write(("none", None))
    except BaseException as error:
        _end_with(error)
    os._exit(0)


def _end_with(error: BaseException) -> NoReturn:
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
