"""Model directories.

Safetensors as bytes, the lazy mapping, the streamed writer, and the records next to the weights.
"""
