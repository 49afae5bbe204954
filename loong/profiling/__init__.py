"""Measures batches on real workers and fits the cost model to them.

On a `profiled_cluster` one plan runs at a time. `scenarios` generate the plans; `measure` repeats and times
them; `found` holds the fit with its errors, which is written to a file.
"""
