"""One layer: folded from the source's weights to what an output has."""
