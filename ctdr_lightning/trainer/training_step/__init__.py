"""The training step, wrapped."""
