"""What all figures share: one look for each model, and the parts that charts are made of."""
