"""Output of a run: metrics, tables, pictures."""
