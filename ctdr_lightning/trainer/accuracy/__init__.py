"""Recovery inside of a fit."""
