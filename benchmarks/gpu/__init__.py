"""Measurements for a day on which a GPU is at hand: `python -m benchmarks.gpu PART`, see README.md.

Each part fits a time limit, keeps every row as soon as it is measured, and resumes where it was stopped. With
`--toy` each part runs in seconds on a CPU, for tests.
"""
