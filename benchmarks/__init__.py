"""Commands that measure: `python -m benchmarks.NAME`.

Results are committed in benchmarks/results, with the machine named.
"""
