"""SIGTERM, SIGHUP and SIGINT during long work.

They end it at once where nothing would be lost, and otherwise after the step at work.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# SIGHUP, which a closed terminal sends, is unknown to Windows.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


class Interrupted(BaseException):
    """One of these signals arrived. What was saved is kept, and the same request resumes from there.

    It is not an `Exception`, like KeyboardInterrupt: it may be raised inside any library, which must not take
    it for a failure.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def interruptible(received: list[int]) -> Iterator[None]:
    """Have the first signal raise `Interrupted` wherever it arrives, except in `deferred`.

    A second signal acts as usual. Everything on disk is written whole or not at all, so that being stopped
    anywhere loses no more than being killed there.
    """
    previous = _handlers()

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, previous[signum])
        raise _stopped(signum)

    with _handling(receive):
        yield


@contextmanager
def deferred(received: list[int]) -> Iterator[None]:
    """Append signals to `received` and continue, for code that looks there between two steps.

    A second signal acts as it did before.

    Raises:
        Interrupted: at the end, if a signal arrived.
    """
    previous = _handlers()

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, previous[signum])

    with _handling(receive):
        yield
    if received:
        raise _stopped(received[-1])


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore signals for the duration, when only tidying up is left."""
    with _handling(signal.SIG_IGN):
        yield


def _handlers() -> dict[int, Any]:
    """Return the handlers of signals, apart from those that this process is to ignore, as under nohup."""
    found = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    return {signum: handler for signum, handler in found.items() if handler not in (signal.SIG_IGN, None)}


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Handle the signals in this way for the duration; only the main thread can and receives them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = _handlers()
    try:
        for signum in previous:
            signal.signal(signum, handler)
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def _stopped(signum: int) -> Interrupted:
    return Interrupted(signum, f"stopped by {signal.Signals(signum).name}; what was saved is kept")
