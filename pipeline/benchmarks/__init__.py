"""Benchmarks: scripts that time the project against its alternatives, side by side in one process.

Some names mean the same in every script that has them:

KEYS             columns that identify a row of the table
Key              type of the values that identify a call
SMALLEST         smallest size
SAMPLE_SECONDS   a sample repeats its call for at least this long
MOST_SECONDS     a call that is predicted to take longer is not timed
measure          returns the table
fits             returns whether to time a call
ratios           returns the numbers that pages quote
"""
