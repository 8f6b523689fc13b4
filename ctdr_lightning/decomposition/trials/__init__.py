"""Choices tried out on a dense model: factors made, fitted to its outputs, measured, and taken off again."""
