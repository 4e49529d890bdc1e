"""Means and intervals over seeds, the rule of verdicts, and the claims that it judges."""
