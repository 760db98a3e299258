"""The version of kvfold: the build reads it here, and every record names it."""

__version__ = "0.1.0"
