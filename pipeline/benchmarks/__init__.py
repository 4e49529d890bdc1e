"""Scripts that time the project against its alternatives, side by side in one process."""
