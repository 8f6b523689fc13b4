"""A step written down: from tensors to a trace."""
