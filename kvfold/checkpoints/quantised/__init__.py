"""Quantised checkpoints: one file per published layout, a table of them, and a lazy mapping over all."""
