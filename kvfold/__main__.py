"""`python -m kvfold` is the `kvfold` command."""

from .cli import main

if __name__ == "__main__":
    main()
