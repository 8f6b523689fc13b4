"""Shared by policies: chains, moves, local search."""
