"""`python -m kvfold` is the `kvfold` command."""

from .cli import main
from .core.console import run_as_process

if __name__ == "__main__":
    run_as_process(main)
