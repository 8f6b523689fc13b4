"""What policies share: chains, moves, local search."""
