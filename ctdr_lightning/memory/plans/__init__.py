"""What will be done in a step, as data."""
