"""The process that reads untrusted rows for `document_rows`: a request on its input, frames on its output."""

import os
import pickle
import sys
import traceback
from typing import Any, NoReturn

from ..core.system_calls import limit_memory
from .document_rows import UNREADABLE, Frame, explain, open_rows
from .text_files import BoundedStream, expansion_limit


def main() -> None:
    """Read one request, write its batches, and last how they ended."""
    request, source = pickle.load(sys.stdin.buffer)
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # no library's print comes between the frames
    _bound_decompressors(request.least_expansion)

    def write(frame: Frame) -> None:
        pickle.dump(frame, frames, protocol=pickle.HIGHEST_PROTOCOL)
        frames.flush()

    try:
        _wait_for_no_threads()
        limit_memory(request.memory)  # now that `datasets` has been imported
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


def _wait_for_no_threads() -> None:
    """Take out the five seconds that `datasets` 5 sleeps behind every shuffled Parquet file.

    They are there so that Arrow's threads are gone when Python shuts down. This process ends without that, by
    `os._exit` or by a signal of its reader.
    """
    from datasets import config

    config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


def _bound_decompressors(least: int) -> None:
    """Let the decompressors of `fsspec`, which `datasets` uses, refuse what expands too far."""
    from fsspec.compression import compr, register_compression  # type: ignore[import-untyped]

    for name in [name for name in ("gzip", "xz", "lzma", "bz2", "zstd") if name in compr]:
        original = compr[name]

        def open_bounded(infile: Any, mode: str = "rb", original: Any = original, **kwargs: Any) -> Any:
            size = infile.seek(0, os.SEEK_END)
            infile.seek(0)
            return BoundedStream(original(infile, mode=mode, **kwargs), expansion_limit(size, least))

        register_compression(name, open_bounded, [], force=True)
