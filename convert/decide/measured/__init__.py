"""Choices of a plan that are measured on some of its layers."""
