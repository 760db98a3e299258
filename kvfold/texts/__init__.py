"""Texts for calibration, training and evaluation.

Files, data sets, the standard library and the WikiText protocols.
"""
