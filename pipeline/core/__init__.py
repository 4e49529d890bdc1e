"""Writes files, reports errors to the user, runs git, and describes the provenance of results, for all other packages."""
