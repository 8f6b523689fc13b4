"""A GPU that is not there: a device guard, compiled here, with which autograd takes fake tensors on "cuda"."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    """The compiled guard; it must be loaded before torch, so that each test of it runs in a process of its own."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the virtual GPU with")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has a guard of its own")
    built = tmp_path_factory.mktemp("guard") / "libguard.so"
    home = Path(torch.__file__).parent
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    sources = [str(HERE / "guard.cpp"), str(HERE / "hooks.cpp")]
    flags = ["-shared", "-fPIC", "-std=c++20", "-O1", "-w"]
    subprocess.run([compiler, *flags, *includes, *sources, "-o", str(built), *libraries], check=True)
    return built


@pytest.fixture(scope="session")
def on_virtual_gpu(guard):
    """Runs a module of this folder in a process with the guard, and returns what it prints."""

    def run(module, *arguments):
        root = HERE.parents[1]
        environment = {**os.environ, "CTDR_VIRTUAL_CUDA": str(guard), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _START, f"tests.virtual_cuda.{module}", *arguments]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


_START = """
import ctypes, os, runpy, sys
ctypes.CDLL(os.environ["CTDR_VIRTUAL_CUDA"], mode=ctypes.RTLD_GLOBAL)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # autograd's thread for that GPU may be at work when the libraries are unloaded, which ends in terminate()
"""
