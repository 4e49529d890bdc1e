"""Computes means and intervals over seeds, and judges claims."""
