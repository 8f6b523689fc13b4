"""The profiler that sees every allocation on a CPU."""

from __future__ import annotations

import os

from torch.profiler import ProfilerActivity, profile


def memory_profiler() -> profile:
    """Return a profiler of CPU memory that does not log its starts and stops, unless the user asked for such logs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)
