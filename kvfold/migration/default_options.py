"""Defaults of `kvfold migrate`, kept apart from heavy imports."""

STEPS = "50%,25%,12.5%"  # shares of the source's cache
WINDOW = 1024  # the most tokens of a window
