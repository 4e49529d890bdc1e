"""Defines schemas for params.yaml, paper.yaml and result records, reads these files, and sets each model's line style."""
