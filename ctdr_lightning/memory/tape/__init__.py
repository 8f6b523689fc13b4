"""A plan carried out in eager PyTorch."""
