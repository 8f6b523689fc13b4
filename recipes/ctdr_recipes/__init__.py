"""Runnable recipes around the package: training by config, and the demo.

Profiling memory makes torch log each start and stop, and warn of what was allocated before. It reads its log levels
when it is imported or first used, so they are set here.
"""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
