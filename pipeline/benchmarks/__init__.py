"""Benchmarks of our code and its alternatives. Most scripts time both in the same process."""
