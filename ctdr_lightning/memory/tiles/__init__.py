"""Modules that run tile by tile of their samples."""
