"""The command `kvfold distill` as a module, for `accelerate launch -m kvfold.distill RECIPE`."""

from ..core.console import run_as_process
from .cli import main

if __name__ == "__main__":
    run_as_process(main)
