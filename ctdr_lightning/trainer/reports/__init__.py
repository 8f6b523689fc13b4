"""What a run says: metrics, tables, pictures."""
