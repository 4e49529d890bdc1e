"""Trains models, and writes and reads the files of their runs."""

HISTORY_COLUMNS = ("step", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")  # columns of history.csv
