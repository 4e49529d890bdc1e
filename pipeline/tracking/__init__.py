"""The runs in MLflow: a view of the files under runs/, which stay the truth."""
