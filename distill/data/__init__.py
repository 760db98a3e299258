"""The data of a run: documents as tokens, on disk, in windows, in their order."""
