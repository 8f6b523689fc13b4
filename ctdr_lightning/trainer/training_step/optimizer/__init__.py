"""The optimizers of a run: their bytes, their state, their step."""
