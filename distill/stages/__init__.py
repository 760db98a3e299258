"""The stages of a run: student and teacher, the training loop, alignment and layer-wise streaming."""
