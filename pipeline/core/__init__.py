"""Used by every other package: writing files, errors for the user, git, and the provenance of results."""
