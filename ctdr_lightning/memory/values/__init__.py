"""A tensor at run time: held, or made again."""
