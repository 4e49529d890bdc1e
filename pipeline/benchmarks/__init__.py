"""Benchmarks: scripts that time the project against its alternatives, side by side in one process.

A name that recurs has one meaning in all scripts. KEYS are the columns that identify a row, `Key` is their values; SMALLEST
is the smallest size, SAMPLE_SECONDS the least time of a sample, MOST_SECONDS the most of a call that is timed. `measure`
returns the table, `fits` whether to time a call, `ratios` the facts that pages quote.
"""
