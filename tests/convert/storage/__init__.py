"""Tests of the coordinates of caches."""
