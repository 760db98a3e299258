"""The process that reads untrusted rows for `document_rows`: a request on its input, frames on its output."""

import os
import pickle
import sys
from typing import Any

from .document_rows import UNREADABLE, Frame, explain, open_rows
from .text_files import BoundedStream, expansion_limit


def main() -> None:
    """Read one request, write its batches, and last how they ended."""
    from datasets import config

    request, source = pickle.load(sys.stdin.buffer)
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # no library's print comes between the frames
    _bound_decompressors(request.least_expansion)
    # Five seconds behind every shuffled Parquet file, so that Arrow's threads are gone when Python ends. This
    # process does not end like that: whoever reads its frames kills it.
    config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0

    def write(frame: Frame) -> None:
        pickle.dump(frame, frames, protocol=pickle.HIGHEST_PROTOCOL)
        frames.flush()

    try:
        for columns in open_rows(request):
            write(("rows", dict(columns)))
        write(("end", None))
    except BrokenPipeError:  # enough was read
        os._exit(0)
    except UNREADABLE as error:
        write(("refusal", str(explain(error, source))))
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise
        write(("none", None))


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
