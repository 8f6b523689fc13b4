"""A plan's tensors in an allocator: reserved bytes, fragmentation, addresses."""
