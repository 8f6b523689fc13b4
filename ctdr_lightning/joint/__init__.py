"""Ranks and recomputation chosen together: the only place that knows both halves."""
