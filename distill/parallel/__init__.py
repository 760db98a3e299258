"""The processes of a run: shared models, units that are loaded apart, and the profiles of accelerate."""
