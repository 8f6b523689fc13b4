"""Tensors in, factors out: no module here knows what a layer is."""
