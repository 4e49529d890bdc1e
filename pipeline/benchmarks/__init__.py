"""Benchmarks: scripts that time the project against its alternatives, side by side in one process.

Names mean the same in all scripts. KEYS are the columns that identify a row; `Key` holds their values. SMALLEST is the
smallest size. A sample takes at least SAMPLE_SECONDS; a call that takes more than MOST_SECONDS is not timed. `measure`
returns the table, `fits` whether to time a call, `ratios` the numbers that pages quote.
"""
