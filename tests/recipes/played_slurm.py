"""A SLURM that a test plays: `sbatch`, `srun`, `squeue`, `sacct`, `scancel` and `scontrol requeue` on this machine.

Each command is a file that runs this one. All nodes are this machine. Jobs are processes in the background; what is
known of them are files in one folder: `<job>.pid`, `<job>.state`, and `<job>.requeue` while a job waits to run again.
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
    text = Path(file).read_text()
    tasks, nodes = ((re.findall(rf"--{option}=(\d+)", text) or ["1"])[0] for option in ("ntasks-per-node", "nodes"))
    for name in names:
        number, _, index = name.partition("_")
        env = {
            **os.environ, "PLAYED_JOB": name, "SLURM_JOB_ID": number, "SLURM_JOB_NAME": "played",
            "SLURM_NTASKS": str(int(tasks) * int(nodes)), "SLURM_NTASKS_PER_NODE": tasks, "SLURM_NNODES": nodes,
            "SLURM_JOB_NUM_NODES": nodes, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
            "SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost",
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
    """Run the job's command once a task, each with its output in the files that SLURM would write."""
    given = [argument for argument in arguments if argument != "--unbuffered"]
    streams = {}
    for option in ("--output", "--error"):
        at = given.index(option)
        streams[option] = given[at + 1]
        del given[at : at + 2]
    tasks = [_task(given, streams, rank) for rank in range(int(os.environ["SLURM_NTASKS"]))]
    pids = " ".join(str(task.pid) for task in tasks)
    (_jobs() / f"{os.environ['PLAYED_JOB']}.pid").write_text(pids)
    sys.exit(max(abs(task.wait()) for task in tasks))


def _task(command, streams, rank):
    name = os.environ["PLAYED_JOB"]
    number, _, index = name.partition("_")
    files = []
    for path in streams.values():
        for pattern, text in (("%A", number), ("%a", index), ("%j", name), ("%t", str(rank))):
            path = path.replace(pattern, text)
        Path(path).parent.mkdir(parents=True, exist_ok=True)  # submitit makes it when sbatch has answered
        files.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    node, local = divmod(rank, int(os.environ["SLURM_NTASKS_PER_NODE"]))
    env = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
    return subprocess.Popen(command, stdout=files[0], stderr=files[1], env=env)


def scancel(name, option, number):
    """Send a signal to each task of a job."""
    assert option == "--signal"
    for pid in (_jobs() / f"{name}.pid").read_text().split():
        os.kill(int(pid), signal.Signals[f"SIG{number.removeprefix('SIG')}"])


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
