"""The observation of a run: held-out evaluation, metrics, trackers, progress and curves."""
