"""Methods from weights to weights: pooling, grouping, latents, slots, refinement and published rules."""
