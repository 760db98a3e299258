"""Distillation recipes: the schema, its sections and the files that hold them."""
