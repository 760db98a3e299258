"""A whole run: the checks before it starts, its claim on a directory, its stages, resuming, and export."""
