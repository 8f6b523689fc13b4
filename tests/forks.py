"""Training in forked processes that can be killed for real: one process, or two gloo ranks."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import traceback

import torch

import tests.conftest  # noqa: F401  a spawned process wants torchvision's operators before it imports the test


def run(target, *args, ranks=1, timeout_s=120, start="fork"):
    """Run a function in forked processes, rank by rank; returns their exit codes (negative: killed by that signal).

    When one of several ranks dies the others are killed too, as a launcher does. With ``start="spawn"`` they are fresh
    processes: a fork takes with it the freed memory of the tests before, which no limit of the address space counts.
    """
    context = multiprocessing.get_context(start)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [context.Process(target=_work, args=(target, args, rank, ranks, port)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    waited = 0.0
    while alive := [worker for worker in workers if worker.is_alive()]:
        alive[0].join(0.05)
        waited += 0.05
        if waited > timeout_s or any(worker.exitcode not in (None, 0) for worker in workers):
            for worker in workers:
                if worker.is_alive():
                    os.kill(worker.pid, signal.SIGKILL)
            break
    for worker in workers:
        worker.join()
    return [worker.exitcode for worker in workers]


def _work(target, args, rank, ranks, port):
    if ranks > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), NODE_RANK="0"
        )
    torch.set_num_threads(1)
    faulthandler.enable(file=2)  # the test's captured text shows where a signal came, not the terminal alone
    try:
        target(*args)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os._exit(0)


def die():
    """Kill this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)
