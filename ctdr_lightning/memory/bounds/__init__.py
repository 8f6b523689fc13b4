"""Lower bounds of time and memory that hold for every plan."""
