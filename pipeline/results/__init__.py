"""Tables of runs, for Table 2 and for every study, and the measurements of trained models."""
