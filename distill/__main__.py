"""`python -m kvfold.distill` is `kvfold distill`, so that `accelerate launch -m kvfold.distill RECIPE`
works.
"""

from ..core.console import run_as_process
from .cli import main

if __name__ == "__main__":
    run_as_process(main)
