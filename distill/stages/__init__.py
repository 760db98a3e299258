"""The stages of a run: models, training states, the work of each mode, and its objective."""
