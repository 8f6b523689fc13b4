"""A SLURM that a test plays: `sbatch`, `srun`, `squeue`, `sacct`, `scancel` and `scontrol requeue` on this machine.

Each command is a file that runs this one. Jobs are processes in the background; what is known of them are files in one
folder: `<job>.pid`, `<job>.state`, and `<job>.requeue` while a job waits to be run again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol")


def install(folder):
    """Write the commands into a folder; returns the environment in which they are found and one thread is used."""
    folder.mkdir()
    for command in COMMANDS:
        path = folder / command
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {command} "$@"\n')
        path.chmod(0o755)
    jobs = folder / "jobs"
    jobs.mkdir()
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PLAYED_SLURM": str(jobs), "OMP_NUM_THREADS": "1"}


def _jobs():
    return Path(os.environ["PLAYED_SLURM"])


def sbatch(file):
    """Start a job, or each job of an array, one after the other."""
    number = 100 + len(list(_jobs().glob("*.sbatch")))
    (_jobs() / f"{number}.sbatch").write_text(Path(file).read_text())
    array = re.search(r"--array=0-(\d+)", Path(file).read_text())
    names = [f"{number}_{index}" for index in range(int(array[1]) + 1)] if array else [str(number)]
    for name in names:
        (_jobs() / f"{name}.state").write_text("PENDING")
    command = [sys.executable, __file__, "run", str(_jobs() / f"{number}.sbatch"), *names]
    subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"Submitted batch job {number}")


def run(file, *names):
    """What the cluster does with the jobs: run each, again and again while it asks to be queued again."""
    for name in names:
        number, _, index = name.partition("_")
        env = {
            **os.environ, "PLAYED_JOB": name, "SLURM_JOB_ID": number, "SLURM_JOB_NAME": "played", "SLURM_NTASKS": "1",
            "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
            "SLURM_JOB_NODELIST": "here", "SLURM_NODELIST": "here",
        }  # fmt: skip
        env |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index} if index else {}
        while True:
            (_jobs() / f"{name}.state").write_text("RUNNING")
            code = subprocess.run(["bash", file], env=env).returncode
            asked = _jobs() / f"{name}.requeue"
            if not asked.exists():
                break
            asked.rename(_jobs() / f"{name}.requeued")
        (_jobs() / f"{name}.state").write_text("FAILED" if code else "COMPLETED")


def srun(*arguments):
    """Become the job's command, with its output in the files that SLURM would write."""
    name = os.environ["PLAYED_JOB"]
    number, _, index = name.partition("_")
    given = list(arguments)
    for option, stream in (("--output", 1), ("--error", 2)):
        at = given.index(option)
        path = given[at + 1]
        for pattern, text in (("%A", number), ("%a", index), ("%j", name), ("%t", "0")):
            path = path.replace(pattern, text)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        del given[at : at + 2]
    given.remove("--unbuffered")
    (_jobs() / f"{name}.pid").write_text(str(os.getpid()))
    os.execvp(given[0], given)


def scancel(name, option, number):
    """Send a signal to a job."""
    assert option == "--signal"
    os.kill(int((_jobs() / f"{name}.pid").read_text()), signal.Signals[f"SIG{number.removeprefix('SIG')}"])


def scontrol(command, name):
    """Note that a job is to be run again when it has ended."""
    assert command == "requeue"
    (_jobs() / f"{name}.requeue").touch()


def sacct(*_):
    """Tell the states of all jobs."""
    print("JobID|State|NodeList")
    for path in sorted(_jobs().glob("*.state")):
        print(f"{path.stem}|{path.read_text()}|here")


squeue = sacct

if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
