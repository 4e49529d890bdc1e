"""The training itself: the few files, besides the model's in osa/, that can change a number of a run."""
