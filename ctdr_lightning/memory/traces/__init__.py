"""A step that ran, as data."""
