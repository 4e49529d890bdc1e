"""Data sets: downloaded, or read from one's own images, and loaded as tensors."""
