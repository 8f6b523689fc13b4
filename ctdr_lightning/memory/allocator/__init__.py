"""What an allocator makes of a plan's tensors: reserved bytes, fragmentation, addresses."""
