"""What a step did, as data."""
