"""A batch run as several smaller ones."""
