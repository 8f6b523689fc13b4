"""A step that will run, as data."""
