"""What every room stands on: whole files, errors in one sentence, and where numbers come from."""
