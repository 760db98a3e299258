"""What families of source models are.

Names, shapes, what a config means, fused tensors, other classes for them.
"""
