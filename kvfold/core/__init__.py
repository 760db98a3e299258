"""Errors, console, units, files, memory, processes and the Hub: shared by every part, and without models."""
