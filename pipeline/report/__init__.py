"""Presents results as text, figures, tables and pages. Nothing is measured or judged here."""
