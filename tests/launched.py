"""Runs of the tiny recipe through the real launchers, watched line by line, for tests that interrupt them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

OURS = ["-m", "mtraining_nns.cli", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mtraining_nns.train"]


def command(path: str, *overrides: str, torchrun: bool = False, nproc: int = 2) -> list[str]:
    if torchrun:
        return [sys.executable, *TORCHRUN, path, *overrides]
    return [sys.executable, *OURS, path, "--nproc", str(nproc), *overrides]


def run(line: list[str], at: str = "", act: Callable[[subprocess.Popen], None] | None = None, timeout_s: int = 120):
    """(exit code, what it printed) of a run; once a line contains `at`, act(process) is called."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    said = []
    try:
        for text in process.stdout:
            said.append(text)
            if act is not None and at in text:
                act(process)
                act = None
        return process.wait(timeout_s), "".join(said)
    finally:
        process.kill()


def workers(process: subprocess.Popen) -> list[int]:
    """Process ids of a launcher's workers, in the order of their ranks."""
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def sends(number: signal.Signals, *, worker: int | None = None, again_after_s: float | None = None):
    """An action for `run`: the signal to the launcher or to one worker, and once more."""

    def act(process: subprocess.Popen) -> None:
        target = process.pid if worker is None else workers(process)[worker]
        os.kill(target, number)
        if again_after_s is not None:
            time.sleep(again_after_s)
            os.kill(target, number)

    return act
