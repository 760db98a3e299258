"""The layers of a checkpoint: their kinds, rotations and shapes."""
