"""How fast it is, against what else one would run: scripts that measure side by side in one process."""
