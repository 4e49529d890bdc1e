"""Scripts that time our code and its alternatives, most of them side by side in one process."""
