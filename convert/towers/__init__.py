"""The text tower of a multimodal checkpoint: taken out as a causal language model, and put back folded."""
