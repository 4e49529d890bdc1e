"""Trains models. Only the few files here, and osa/, can change the results of a run."""

HISTORY_COLUMNS = ("step", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")  # of history.csv
