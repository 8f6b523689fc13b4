"""Outputs that are made only if they are looked at."""
