"""What every stage stands on. No number of a result is made here."""
