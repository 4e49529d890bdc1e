"""Common code of all other packages: files, errors for the user, git, and the provenance of results."""
