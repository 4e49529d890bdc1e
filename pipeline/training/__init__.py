"""Trains a model. Apart from osa/, only the few files here can change the results of a run."""

HISTORY_COLUMNS = ("step", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")  # of history.csv
