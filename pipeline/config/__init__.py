"""Configuration: the schema of params.yaml and paper.yaml, their reader, and the look of each model."""
