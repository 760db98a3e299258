"""Observation of a run: metrics, evaluation on held-out text, trackers, and the report of a stage."""
