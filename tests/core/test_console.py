"""Behaviour that all commands share."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvfold.cli import main as kvfold
from kvfold.core import console
from kvfold.core.console import Command, calling, listening, notice
from kvfold.core.errors import InvalidInput, renamed


def test_options_get_other_names_outside_of_commands() -> None:
    names = {"--kv-budget": "kv_budget", "--to": "target"}
    sentence = "--kv-budget 5 (kvfold convert --to mla): use `--to gqa`, --to mqa or --kv-budgets"
    said = renamed(sentence, names)
    assert said == "kv_budget 5 (kvfold convert --to mla): use `--to gqa`, target mqa or --kv-budgets"
    with listening(names=names) as heard, listening() as inner:
        notice("--to is told")
    assert heard.notices == inner.notices == ["target is told"]


def test_a_notice_of_a_call_in_python_is_short_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    with listening(None) as heard:
        notice(f"there is a weight {'a' * 10**6}\x1b[31m that is ignored")
    (text,) = heard.notices
    assert caplog.messages == [text]
    assert len(text) < 3000
    assert text.endswith(r"\x1b[31m that is ignored")


def test_a_notice_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    """It may quote a name of a file, which may be of any length."""
    with console.showing():
        notice(f"there is a weight {'a' * 10**6} that is ignored")
    shown = capsys.readouterr().err
    assert len(shown) < 2000
    assert shown.endswith("a that is ignored\n")


@pytest.mark.parametrize(("words", "sentence"), [
    ("evla", "No such command 'evla'"),
    ("--verbos", "No such option"),
    ("eval recipes/demo --txet stdlib", "No such option"),
    ("eval", "Missing argument 'MODEL'"),
    ("distill explain", "Missing argument 'RECIPE"),
    ("eval recipes/demo --window many", "Invalid value for '--window': 'many' is not a valid integer range"),
    ("eval recipes/demo --suite ppl --suite=cache", "--suite is given 2 times; give it once, with commas"),
    ("migrate recipes/demo --to gqa --until kl<1 --out x --steps 50% --steps 25%",
     "--steps is given 2 times; give it once, with commas"),
    ("eval recipes/demo out", "unexpected argument out; kvfold eval takes MODEL, and --out names the output"),
    ("families llama", "unexpected argument llama; kvfold families takes options only"),
    ("plan a b c", "unexpected argument b c; kvfold plan takes MODEL"),
])  # fmt: skip
def test_a_mistake_in_the_words_of_a_command_is_one_sentence(words: str, sentence: str) -> None:
    done = CliRunner().invoke(kvfold, words.split(), prog_name="kvfold")
    command = " ".join(
        word
        for word in words.split()[:2]
        if word in {"eval", "convert", "distill", "explain", "families", "migrate", "plan"}
    )
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "")
    assert line.startswith(f"Error: {sentence}")
    assert line.endswith(f"; see {f'kvfold {command}'.strip()} --help")


def test_the_last_of_several_values_counts(tmp_path: Path) -> None:
    """Scripts append options to replace earlier ones."""
    words = "convert recipes/demo --to mqa --to gqa --kv-heads 2 --dry-run --json --out"
    done = CliRunner().invoke(kvfold, [*words.split(), str(tmp_path / "out")])
    assert json.loads(done.stdout)["target"]["name"] == "gqa"


def test_a_pattern_of_a_tokenizer_that_gives_up_is_a_mistake_of_the_files() -> None:
    """Its error derives from BaseException."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")

    @click.command(cls=Command)
    def command() -> None:
        tokenizer.encode("a" * 60 + "b")

    done = CliRunner().invoke(command)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: the tokenizer fails on a text (")
    with pytest.raises(InvalidInput, match="published with"), calling():
        tokenizer.encode("a" * 60 + "b")


def test_a_full_memory_is_one_sentence_in_every_command() -> None:
    """Also outside of the parts whose sentence names what takes less."""

    @click.command(cls=Command)
    def work() -> None:
        raise MemoryError

    done = CliRunner().invoke(work)
    assert done.exit_code == 2
    assert done.stderr == (
        "Error: this machine has too little memory; end other programs, or use a machine with more\n"
    )
    with pytest.raises(InvalidInput, match="too little memory"), calling():
        raise MemoryError


def test_ctrl_c_says_how_to_resume_and_exits_as_a_shell_expects() -> None:
    @click.command(cls=Command)
    def work() -> None:
        raise KeyboardInterrupt

    done = CliRunner().invoke(work)
    assert done.exit_code == 130
    assert done.stderr == "Interrupted: stopped by SIGINT; run the same command again.\n"


STOPPED = """
import click, os, signal
from pathlib import Path
from kvfold.core.console import Command
from kvfold.core.work import claimed

@click.command(cls=Command)
@click.argument("signum", type=int)
@click.argument("place", type=Path)
def main(signum, place):
    with claimed(place, "work") as work:
        work.begin({})
        os.kill(os.getpid(), signum)
        print("not stopped")

main()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_every_command_with_one_sentence_and_no_leftovers(signum: int, tmp_path: Path) -> None:
    words = [sys.executable, "-c", STOPPED, str(int(signum)), str(tmp_path / "work")]
    # Where the tests themselves were started by nohup, every process that they start would ignore SIGHUP.
    done = subprocess.run(
        words, capture_output=True, text=True, preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL)
    )
    told = f"Interrupted: stopped by {signal.Signals(signum).name}; what was saved is kept; run the same"
    assert (done.returncode, done.stdout) == (128 + signum, ""), done.stderr
    assert done.stderr == f"{told} command again.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As nohup has it."""
    words = [sys.executable, "-c", STOPPED, str(int(signal.SIGHUP)), str(tmp_path / "work")]
    done = subprocess.run(["nohup", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "not stopped\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["families --json", "families"])
def test_a_full_stdout_is_named(words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvfold", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == (
        "Error: standard output cannot be written: No space left on device; all else that the command does "
        "is done\n"
    )
    assert done.returncode == 2


@pytest.mark.parametrize(("variables", "sentence"), [
    ({"RANK": "1"}, "the environment has RANK=1, where a launched process has WORLD_SIZE, RANK, "),
    ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE=2, where"),
    ({"WORLD_SIZE": "two"}, "the environment has WORLD_SIZE=two, where"),
    ({"LOCAL_RANK": "0"}, "the environment has LOCAL_RANK=0, where"),
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
     "the environment has WORLD_SIZE=2, RANK=0, LOCAL_RANK=0, MASTER_ADDR=127.0.0.1, where"),
    ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
     "the environment has WORLD_SIZE=2, RANK=2, "),
    ({"WORLD_SIZE": "1", "RANK": "0"}, None),
])  # fmt: skip
@pytest.mark.parametrize("words", ["families --json", "convert a --to mqa", "distill a", "eval a"])
def test_half_of_a_launchers_variables(words: str, variables: dict[str, str], sentence: str | None) -> None:
    done = CliRunner(env=variables).invoke(kvfold, words.split())
    if sentence is None:
        assert "the environment has" not in done.stderr
        return
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith(f"Error: {sentence}")


def test_help_is_shown_where_a_list_is_given_twice() -> None:
    done = CliRunner().invoke(kvfold, "eval recipes/demo --suite ppl --suite cache --help")
    assert (done.exit_code, done.stdout.startswith("Usage:")) == (0, True)


ENDING = """
import atexit, os, sys, threading, time, click
from kvfold.core.console import run_as_process

class Thing:
    def __del__(self):
        os.abort()  # as gloo's threads do while the interpreter is taken apart

thing = Thing()
thing.itself = thing
atexit.register(print, "and a tracker's last word")

@click.command()
@click.option("--code", type=int, default=0)
def main(code):
    print("a result", end=" ")
    threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread", end=" "))).start()
    sys.exit(code)

run_as_process(main)
"""


@pytest.mark.parametrize("code", [0, 2])
def test_one_of_several_processes_ends_before_the_interpreter_is_taken_apart(code: int) -> None:
    """Its output and the work registered for its end are there, and its exit code is the command's."""
    command, environment = (
        [sys.executable, "-c", ENDING, "--code", str(code)],
        os.environ | {"PYTHONUNBUFFERED": ""},
    )
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"WORLD_SIZE": "2"})
    assert (done.returncode, done.stdout) == (code, "a result of a thread and a tracker's last word\n"), (
        done.stderr
    )
    alone = subprocess.run(command, capture_output=True, text=True, env=environment | {"WORLD_SIZE": "1"})
    assert alone.returncode == -signal.SIGABRT


def test_the_time_left_counts_what_is_worked_on_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight units, four at once: the first four take ten seconds, and so will the others."""
    clock = iter([0.0, *(10.0 + done for done in range(4)), *(21.0 + done for done in range(4))])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(console, "is_shown", lambda: True)
    monkeypatch.setattr(console, "PLAIN_INTERVAL", 0.0)
    assert list(console.progress(range(8), "fold", 8, at_once=4)) == list(range(8))
    said = [line.partition(", ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["10 s left", "11 s left", "12 s left", "13 s left", "", "", "", "0 s left"]


def _of_library(name: str, kind: type[BaseException]) -> Callable[[], None]:
    """Return a function of a module of some name that raises an error inside of a function of json."""
    names = {"__name__": name, "kind": kind, "json": json}
    code = "def act():\n def fail(pairs): raise kind('no unknown token')\n json.loads('{}', object_hook=fail)"
    exec(code, names)
    act: Callable[[], None] = names["act"]  # type: ignore[assignment]
    return act


@pytest.mark.parametrize(("name", "kind", "says"), [
    ("transformers.models.x", KeyError, "transformers stopped with KeyError (\"'no unknown token'\"): "),
    ("datasets.load", TypeError, "datasets stopped with TypeError ('no unknown token'): its files may"),
    ("transformers.y", Exception, "the tokenizer fails on a text ('no unknown token')"),
    ("kvfold.texts", Exception, "the tokenizer fails on a text"),
])  # fmt: skip
def test_errors_of_libraries_are_sentences(name: str, kind: type[Exception], says: str) -> None:
    act = _of_library(name, kind)
    done = CliRunner().invoke(click.command(cls=Command)(lambda: act()))
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("name", "kind"), [("kvfold.x", ValueError), ("somebody", Exception)])
def test_other_errors_are_not_hidden(name: str, kind: type[Exception]) -> None:
    done = CliRunner().invoke(click.command(cls=Command)(_of_library(name, kind)))
    assert isinstance(done.exception, kind)
