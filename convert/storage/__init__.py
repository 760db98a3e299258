"""Coordinates in which a layer writes its cache, for formats of few bits."""
