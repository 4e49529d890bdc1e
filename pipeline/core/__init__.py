"""Code that all other packages share: files, errors, git, and the provenance of results."""
