"""One layer of attention as tensors: rotary pairs, metrics, subspaces, queries and targets.

No file, no model, no device.
"""
