"""Defines and reads params.yaml, paper.yaml and the records of results, and gives each model its colour and dashes."""
