"""Experiments: one claim a file, each runnable as `python -m experiments NAME`."""
