"""A whole run.

From a recipe to a checkpoint, its claim, state, resume and export, and the checks before it starts.
"""
