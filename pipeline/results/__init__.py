"""Makes tables of runs, for Table 2 and for every study, and measures trained models."""
