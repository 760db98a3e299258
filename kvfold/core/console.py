"""Parts of every command: mistakes as one line with exit code 2, progress of long work, results as tables.

No heavy import here: `--help` goes through this module.
"""

import atexit
import errno
import gc
import inspect
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import TextIOWrapper
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import click

from .disk import disk_error, disk_sentence, writing_errors
from .errors import InvalidInput, bounded, naming, renamed
from .grid import WIDTH, Grid
from .memory import enough_memory
from .signals import Interrupted, interruptible
from .units import seconds_left
from .untrusted import printable, shorten
from .waiting import wait_passively_if_busy

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int], None]  # a description, items done, items in all
LOG = logging.getLogger("kvfold")
LOG.addHandler(logging.NullHandler())  # a library prints nothing unless its user configures logging
_EMPTY = re.compile(r"(--[\w-]+)=|")  # `--out=` and an empty argument
# Libraries that read the user's files, and what their errors pass through.
_LIBRARIES = {
    "transformers", "tokenizers", "sentencepiece", "safetensors", "huggingface_hub", "accelerate", "datasets",
    "pyarrow", "jinja2", "lm_eval", "yaml",
}  # fmt: skip
# What a launcher tells its processes; torch joins them by the address.
_LAUNCH = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_PASSED_TO = {*sys.stdlib_module_names, "torch", "numpy", ""}
PLAIN_INTERVAL = 10.0  # seconds between progress lines where there is no terminal


def is_first() -> bool:
    """Return whether this process speaks for all processes of the launcher."""
    return os.environ.get("RANK", "0") == "0"


def processes_in_all() -> int:
    """Return how many processes the launcher started; 1 without one."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() else 1


def check_launch() -> None:
    """Refuse a launcher's environment variables if some are missing or contradict each other.

    Raises:
        InvalidInput: names those that are there.
    """
    given = {name: os.environ[name] for name in _LAUNCH if name in os.environ}
    is_launched = given.get("WORLD_SIZE", "1") != "1" or given.get("RANK", "0") != "0"
    if not is_launched and "LOCAL_RANK" not in given:  # an address alone may be that of something else
        return
    numbers = [value for name, value in given.items() if name != "MASTER_ADDR"]
    is_whole = len(given) == len(_LAUNCH) and all(map(str.isdecimal, numbers))
    if not is_whole or int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        raise InvalidInput(
            f"the environment has {told}, where a launched process has {', '.join(_LAUNCH)}, numbers but for "
            "the address; start it with accelerate launch, or unset RANK, LOCAL_RANK and WORLD_SIZE"
        )


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; a caller of the library may have put anything in its place."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None, an object that only writes, or a closed file
        return False


class _Refusal(click.ClickException):
    exit_code = 2


@contextmanager
def refusing() -> Iterator[None]:
    """Let mistakes in the block end as one line: kvfold's, and click's, such as an unknown option.

    Raises:
        click.ClickException: with the sentence and exit code 2. Click's sentence, which is one of four lines,
            names the command whose --help has more.
    """
    try:
        yield
    except InvalidInput as mistake:
        raise _Refusal(printable(str(mistake))) from None
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as mistake:
        command = "" if mistake.ctx is None else f"; see {mistake.ctx.command_path} --help"
        text = " ".join(mistake.format_message().split()).removesuffix(".")
        raise _Refusal(bounded(printable(text + command))) from None


class Command(click.Command):
    """A click command whose mistakes end as one line with exit code 2, without a traceback.

    The line is `Error: <sentence>`. Characters that stdout cannot encode are printed as escapes.
    """

    make_context = refusing()(click.Command.make_context)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; refuse one too many, an empty or repeated one, and one that is not UTF-8.

        No record could hold the last, and an empty path would be the current directory.
        """
        takes_value = {
            name for part in self.params if not getattr(part, "is_flag", True) for name in part.opts
        }
        end = args.index("--") if "--" in args else len(args)  # what follows is another program's
        own = args[:end]
        for before, argument in zip(["", *own], own, strict=False):
            empty = _EMPTY.fullmatch(argument)
            if empty:
                name = empty[1] or (before if before in takes_value else "an argument")
                raise _Refusal(f"{name} is empty; give it a value, or leave it out")
        for argument in args:
            if any("\ud800" <= character <= "\udfff" for character in argument):
                raise _Refusal(
                    f"the argument {printable(argument)} is not UTF-8; rename the file or the directory"
                )
        allowed, ctx.allow_extra_args = ctx.allow_extra_args, True
        extra = super().parse_args(ctx, list(args))
        ctx.allow_extra_args = allowed
        if ctx.resilient_parsing:
            return extra
        check_launch()
        # Of an option that is given twice click takes the last, as scripts expect; a list is not dropped.
        *_, given = self.make_parser(ctx).parse_args(list(args))
        for part in given:
            is_list = isinstance(part, click.Option) and not part.multiple and "," in (part.metavar or "")
            if is_list and given.count(part) > 1:
                ctx.fail(f"{part.opts[0]} is given {given.count(part)} times; give it once, with commas")
        if extra and not allowed:  # often the name of the output
            places = [part.make_metavar(ctx) for part in self.params if isinstance(part, click.Argument)]
            names_output = any("--out" in part.opts for part in self.params)
            ctx.fail(
                f"unexpected argument {' '.join(map(printable, extra))}; {ctx.command_path} takes "
                f"{' and '.join(places) or 'options only'}"
                + (", and --out names the output" if names_output else "")
            )
        return extra

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and report what it cannot do, or Ctrl-C, as one sentence."""
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        wait_passively_if_busy()
        try:
            with interruptible([]), refusing(), showing(), explaining():
                return super().invoke(ctx)
        except (Interrupted, KeyboardInterrupt) as stop:  # of the latter click would print "Aborted!"
            if is_first():
                told = stop if isinstance(stop, Interrupted) else "stopped by SIGINT"
                click.echo(f"Interrupted: {told}; run the same command again.", err=True)
            sys.exit(128 + getattr(stop, "signum", signal.SIGINT))
        except _Refusal:
            raise
        except click.ClickException as mistake:  # a check that fails, which may name a file
            kind = type("_Failure", (click.ClickException,), {"exit_code": mistake.exit_code})
            raise kind(bounded(printable(mistake.message))) from None


@contextmanager
def explaining() -> Iterator[None]:
    """Turn errors of the file system, and of libraries that read the user's files, into one sentence.

    Those of the file system name the file, also where the disk or the memory is full. Whatever else a library
    raises on files that were not checked for it ends here; errors of kvfold itself pass.

    Raises:
        InvalidInput: one of these.
    """
    try:
        with enough_memory("end other programs, or use a machine with more"):
            yield
    except (InvalidInput, click.ClickException, click.exceptions.Exit):
        raise
    except writing_errors() as error:
        of_disk = disk_error(error)
        if of_disk is not None:
            raise InvalidInput(disk_sentence(of_disk)) from error
        if isinstance(error, OSError) and error.filename is not None:
            name = shorten(error.filename) if error.errno == errno.ENAMETOOLONG else error.filename
            raise InvalidInput(f"{name}: {error.strerror}") from error
        _blame_library(error)
        raise
    except BaseException as error:  # also panics of libraries that are written in Rust
        _blame_library(error)
        raise


def _blame_library(error: BaseException) -> None:
    """Raise the sentence for an error of a library that reads the user's files; return for other errors.

    The library tokenizers raises `Exception` itself, such as for a vocabulary without an unknown token, and
    panics that derive from BaseException, such as for a pattern that takes too many steps.
    """
    frames = traceback.walk_tb(error.__traceback__)
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    # What a library passed on to Python's own modules, or to torch, is still its error.
    blamed = next((name for name in reversed(packages) if name not in _PASSED_TO), "")
    if type(error) is Exception and blamed in {*_LIBRARIES, "kvfold"}:
        blamed = "tokenizers"
    if type(error).__module__ == "pyo3_runtime" or blamed == "tokenizers":
        raise InvalidInput(
            f"the tokenizer fails on a text ({shorten(str(error), 300)}); use another text, or the "
            "tokenizer.json that the model was published with"
        ) from error
    if blamed in _LIBRARIES and isinstance(error, Exception):
        if os.environ.get("KVFOLD_DEBUG") == "1":
            traceback.print_exception(error)
        raise InvalidInput(
            f"{blamed} stopped with {type(error).__name__} ({shorten(str(error), 300)}): its files may be "
            "damaged or need another version of it, or this is a bug; KVFOLD_DEBUG=1 in the environment "
            "shows where"
        ) from error


def run_as_process(command: click.Command) -> None:
    """Run a command as all that this process does; where a launcher started several, it ends by `leave`."""
    try:
        command()
    except SystemExit as stop:
        if processes_in_all() > 1 and (stop.code is None or isinstance(stop.code, int)):
            leave(stop.code or 0)
        raise


def leave(code: int = 0) -> NoReturn:
    """End this process without taking the interpreter apart.

    Functions that were registered for the end run first, and printed text is flushed. gloo's threads outlive
    their group as long as a device mesh refers to it. One that releases a tensor while the interpreter is
    taken apart aborts the process, and the launcher reports a finished run as failed.
    """
    threading._shutdown()  # type: ignore[attr-defined] # threads that are no daemons end first, as they do in any process
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def progress(items: Iterable[T], description: str, total: int, at_once: int = 1) -> Iterator[T]:
    """Yield `items` and report how many are done: to the listener, and on stderr inside a command.

    On a terminal a command shows a bar with the time left, elsewhere a plain line every few seconds.
    `at_once` items are worked on side by side; when the first is done, these nearly are.
    """
    reported = _reported(items, description, total) if is_first() else items
    if not is_first() or not is_shown():
        yield from reported
        return
    if is_terminal(sys.stderr):
        from .progress_bar import shown_in_bar

        yield from shown_in_bar(reported, description, total, at_once)
        return
    start = shown = time.monotonic()
    for done, item in enumerate(reported, 1):
        yield item
        now = time.monotonic()
        if now - shown >= PLAIN_INTERVAL:
            shown = now
            left = seconds_left(now - start, done, total, at_once)
            told = "" if left is None else f", {left:.0f} s left"
            print(f"{description}: {done}/{total}{told}", file=sys.stderr, flush=True)


def _reported(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    for done, item in enumerate(items, 1):
        yield item
        report_progress(description, done, total)


def report_progress(description: str, done: int, total: int) -> None:
    """Call the listener's progress function, if there is one."""
    listener = _LISTENER.get()
    if listener is not None and listener.progress is not None:
        listener.progress(description, done, total)


@dataclass(frozen=True)
class Listener:
    """The receiver of what a call of the Python API reports while it works.

    Attributes:
        progress: called with a description, how many items are done and how many there are.
        names: of options in notices, as of `renamed`.
        notices: the sentences that were given to `notice`, in order.
    """

    progress: ProgressCallback | None
    names: Mapping[str, str]
    notices: list[str] = field(default_factory=list)


_LISTENER: ContextVar[Listener | None] = ContextVar("kvfold_listener", default=None)
_IS_SHOWN: ContextVar[bool] = ContextVar("kvfold_is_shown", default=False)


@contextmanager
def listening(
    progress: ProgressCallback | None = None, names: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Listener]:
    """Yield a listener for the duration; a listener further out hears the same."""
    outer = _LISTENER.get()
    if outer is not None:
        progress, names = progress or outer.progress, names or outer.names
    listener = Listener(progress, names)
    token = _LISTENER.set(listener)
    try:
        yield listener
    finally:
        _LISTENER.reset(token)
        if outer is not None:
            outer.notices.extend(listener.notices)


@contextmanager
def calling(
    progress: ProgressCallback | None = None, names: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Listener]:
    """Yield a listener for a call of the Python API, in which an error of a file is `InvalidInput` too.

    `names` are those of `renamed`, for notices and mistakes.

    Raises:
        InvalidInput: the callback cannot be called, or as in the block.
    """
    try:
        is_usable = progress is None or callable(progress)
        if progress is not None and is_usable:
            inspect.signature(progress).bind("", 0, 0)
    except TypeError:
        is_usable = False
    except ValueError:  # one of C, whose arguments are not known
        pass
    if not is_usable:
        raise InvalidInput(
            f"progress is {shorten(progress)}; it should be a function of a description, the items done and "
            "the items in all"
        )
    with listening(progress, names) as listener, naming(names), explaining():
        yield listener


@contextmanager
def showing() -> Iterator[None]:
    """Show notices and progress on stderr for the duration, as commands do; a library prints nothing."""
    token = _IS_SHOWN.set(True)
    try:
        yield
    finally:
        _IS_SHOWN.reset(token)


def is_shown() -> bool:
    """Return whether a command is running, which shows notices and progress on stderr."""
    return _IS_SHOWN.get()


@contextmanager
def loading() -> Iterator[None]:
    """Around a command's heavy imports.

    Looking through what they make, which stays for good, takes a fifth of their time.
    """
    if "torch" in sys.modules:  # somebody else's process, whose own garbage must not stay
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout, as `Grid` aligns it."""
    from rich.console import Console

    # A pipe has no width: never wrap there, so that the lines can be read by grep.
    width = None if is_terminal(sys.stdout) else WIDTH
    with _printing():
        Console(width=width).print(Grid(title, columns, list(rows)))


def show_json(value: Any) -> None:
    """Print exactly one JSON object to stdout."""
    with _printing():
        click.echo(json.dumps(value, indent=2, sort_keys=False))


def show_text(text: str) -> None:
    """Print lines to stdout; of names in them, control characters are printed as escapes."""
    with _printing():
        click.echo("\n".join(map(printable, text.splitlines())))


@contextmanager
def _printing() -> Iterator[None]:
    """Turn errors of stdout, such as a full disk behind it, into one sentence.

    Raises:
        InvalidInput: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # its reader has read enough; click ends the command
            raise
        # Python would write the rest when it ends, and fail again.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise InvalidInput(
            f"standard output cannot be written: {error.strerror}; all else that the command does is done"
        ) from None


def notice(text: str) -> None:
    """Report something that the user should know: to the listener, and on stderr or to the log.

    Inside a command it goes to stderr, so that stdout stays machine-readable; otherwise to the logger
    `kvfold`. Only the first process reports.
    """
    if not is_first():
        return
    listener = _LISTENER.get()
    if listener is not None:
        text = renamed(text, listener.names)
    text = bounded(printable(text))
    if listener is not None:
        listener.notices.append(text)
    if is_shown():
        click.echo(f"Note: {text}", err=True)
    else:
        LOG.warning(text)


def announce(describe: Callable[[], str]) -> None:
    """Show on stderr what a command is about to do; a library prints nothing, and describes nothing."""
    if is_first() and is_shown():
        click.echo(bounded(printable(describe())), err=True)
