"""Families of source models: names, shapes, config fields, fused tensors, and other classes for them."""
