"""What a source computes on text.

Its calibration text, its model in transformers, moments kept layer by layer.
"""
