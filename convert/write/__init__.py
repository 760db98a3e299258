"""The execution of a plan.

Each layer folded, every tensor written at its offset, the journal and the model card.
"""
