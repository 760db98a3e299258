"""The bundled checkpoint: a tiny Llama trained on the standard library, and how it was trained."""
