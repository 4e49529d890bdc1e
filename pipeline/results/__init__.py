"""From runs to tables, for Table 2 and for every study; and what is measured on a trained model."""
