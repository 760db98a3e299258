"""Transformers models.

Loading them whole or layer by layer, their output head, and the cached states of a teacher.
"""
