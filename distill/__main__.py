"""`python -m kvfold.distill` is `kvfold distill`, so that `accelerate launch -m kvfold.distill RECIPE` works."""

from .cli import main

if __name__ == "__main__":
    main()
