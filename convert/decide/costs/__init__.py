"""The time and memory of a fold, before it is made."""
