"""Tensors in, factors out: no module here knows about layers."""
