"""Runs of kvfold's commands in this process."""

from click.testing import CliRunner, Result

from kvfold.cli import main


def ended(done: Result, code: int | None) -> Result:
    """Return a run, which must have ended with an exit code if one is given."""
    assert code in (None, done.exit_code), done.output
    return done


def run_main(*words: object, code: int | None = 0) -> Result:
    """Run a command, which must end with this exit code."""
    return ended(CliRunner().invoke(main, [str(word) for word in words]), code)
