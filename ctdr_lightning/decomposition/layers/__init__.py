"""Factorized layers, and how they take a dense layer's place."""
