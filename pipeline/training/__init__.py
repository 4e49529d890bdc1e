"""The training itself: the few files, besides the model's in osa/, that can change a number of a run."""

COLUMNS = ("step", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")  # of history.csv
