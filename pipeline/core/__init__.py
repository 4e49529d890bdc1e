"""Foundations of every room: whole files, errors in one sentence, and where numbers come from."""
