"""Calibration: the text that a source writes or is given, and the statistics of each layer on it."""
