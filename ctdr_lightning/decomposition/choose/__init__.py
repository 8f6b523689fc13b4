"""Which layers are decomposed, and how much of each is kept."""
