"""Processes forked from a server for each set of modules; `multiprocessing` has only one per process."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any
from unittest import mock


class WarmServer:
    """Forks one process for each call: `WarmServer(["torch"]).run(function, 1)` returns its exit code."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Keep names of modules. They are imported when the first process is asked for."""
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(modules))
        self._context = multiprocessing.get_context("forkserver")

    def run(self, function: Callable[..., None], *arguments: Any) -> int | None:
        """Call a function of a module in a new process; returns the exit code."""
        process = self.start(function, *arguments)
        process.join()
        return process.exitcode

    def start(self, function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
        """Return a new process that calls a function of a module."""
        process = self._context.Process(target=function, args=arguments)
        with mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process):
            process.start()
        return process
