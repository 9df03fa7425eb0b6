"""Start the workers of a run on this machine and report the first error.

    mtraining train RECIPE --nproc N        parent: recipe checked, then N x `python -m mtraining_nns.train RECIPE`

The parent stays to pass signals on (`signals.py`) and to say once what went wrong. Rank 0 writes to the console, the
other ranks to files under `checkpoint.dir/logs`. Several machines are torchrun's work, not this file's:

    torchrun --nnodes 4 --nproc-per-node 8 ... -m mtraining_nns.train RECIPE
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

from mtraining_nns import engines, environment, signals
from mtraining_nns.errors import UserError
from mtraining_nns.recipe import Recipe

AGENT_S = 10.0  # after an error, whoever is killed is killed for it


def launch(path: str, overrides: list[str], nproc: int | None) -> int:
    """Train a recipe with `nproc` local workers; returns the exit code, 2 for what the user got wrong."""
    process = environment.Process.launched()
    recipe = Recipe.load(path, overrides)
    if process is not None:  # torchrun -m mtraining_nns.cli train RECIPE: the processes are there already
        if nproc not in (None, process.local_world):
            raise UserError(f"--nproc {nproc}, but torchrun started {process.local_world} processes; leave --nproc out")
        from mtraining_nns import train

        return train.main([path, *overrides])
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc must be at least 1, got {nproc}")
    nproc = nproc or default_nproc(recipe)
    recipe = recipe.resolve(nproc)
    engines.check(recipe)
    gpus = count_gpus()
    if 0 < gpus < nproc:
        raise UserError(
            f"{nproc} processes need {nproc} GPUs, this machine has {gpus};"
            " lower --nproc and parallel.cp, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    recipe.make_run_folder()
    return run_workers(path, overrides, nproc, os.path.join(recipe.checkpoint.dir, "logs"))


def default_nproc(recipe: Recipe) -> int:
    """Processes when --nproc is not given: what parallel.cp asks for, else one a GPU, else one a ring."""
    parallel = recipe.parallel
    if parallel.cp is not None:
        return parallel.cp * parallel.dp
    return count_gpus() or parallel.dp


def count_gpus() -> int:
    """CUDA devices of this machine; torch is loaded only where a driver is installed."""
    if not (os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi")):
        return 0
    import torch

    return torch.cuda.device_count()


def run_workers(path: str, overrides: list[str], nproc: int, log_dir: str) -> int:
    """Run `nproc` workers to their end; the first failure becomes one report and the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mtraining_nns.replies import Logs

    environment.prepare_launch(nproc)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # we report instead
    replies = tempfile.TemporaryDirectory(prefix="mtraining-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=time.strftime("%Y%m%d-%H%M%S"),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=Logs(log_dir, replies.name, nproc),
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # after any other it would give the workers 30 s to save
    )
    command = ["-u", "-m", "mtraining_nns.train", path, *overrides]
    with replies, signals.passed_on() as came:
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return report(error.failures, log_dir, came)
        except SignalException as error:
            return 128 + error.sigval
    return 0


def report(failures: dict, log_dir: str, came: Sequence[int] = ()) -> int:
    """Print the root cause of failed workers (torch's ProcessFailure by rank) and return the exit code for it.

    came: signals that were passed on to the workers.
    """
    if any(failure.exitcode == signals.STOPPED for failure in failures.values()):  # no rank leaves before all saved
        return signals.STOPPED
    rank = _first(failures)
    failure = failures[rank]
    if came and failure.exitcode in (-came[-1], 128 + came[-1]):
        print(f"mtraining: ended by {signal.Signals(came[-1]).name} without a checkpoint", file=sys.stderr)
        return 128 + came[-1]
    if isinstance(failure.message, str):  # killed, or died without a Python error
        print(f"mtraining: error: rank {rank} died: {failure.message}; logs in {log_dir}", file=sys.stderr)
        return 1
    if failure.message["extraInfo"]["user"]:  # the exit code may be the launcher's: it ends workers that linger
        raise UserError(failure.message["message"])
    print(failure.message["extraInfo"]["py_callstack"], file=sys.stderr)
    print(f"mtraining: error: rank {rank} failed first, see above; logs in {log_dir}", file=sys.stderr)
    return 1


def _first(failures: dict) -> int:
    """The rank that failed first. One without an error file was killed, and its peers' errors came of that.

    Unless torch's agent did it: it ends those that go on after an error by SIGTERM, and by SIGKILL 30 s later.
    """
    errors = {
        rank: float(failure.message["extraInfo"]["seconds"])
        for rank, failure in failures.items()
        if not isinstance(failure.message, str)
    }
    first = min(errors, key=errors.get, default=None)
    killed = [
        rank
        for rank, failure in failures.items()
        if rank not in errors
        and (first is None or (failure.exitcode != -signal.SIGTERM and failure.timestamp < errors[first] + AGENT_S))
    ]
    return killed[0] if killed else first
