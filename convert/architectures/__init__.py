"""What families of source models are: names, shapes, what a config means, fused tensors, other classes for them."""
