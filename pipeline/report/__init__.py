"""How results look: numbers as text, one look per model, figures, tables and pages. Nothing is measured or judged here."""
