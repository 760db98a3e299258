"""Linear weights of a checkpoint rounded to 8 or 4 bits, in the layouts of compressed-tensors."""
