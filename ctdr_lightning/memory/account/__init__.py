"""The bytes of a whole batch: its step, the memory beside it, the optimizer's step after it."""
