"""The one place where environment variables are read and set: which process this is, and what a worker inherits.

torchrun and our own launcher (`launch.py`) describe a process by RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
"""

import ctypes
import os
import platform
import signal
import sys
import tempfile
from dataclasses import dataclass

from mtraining_nns.errors import UserError

PARENT = "MTRAINING_PARENT_PID"  # set by launch.py: that process reports the workers' errors, and they end with it
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun and launch.py: where a worker leaves its error

CACHES = {  # where compilers keep kernels, in a folder of ours
    "TRITON_CACHE_DIR": os.path.join("{}", "triton"),
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": os.path.join("{}", "cute"),
}


@dataclass(frozen=True)
class Process:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: str = ""  # one name a machine, or a launcher's agent where a machine runs several

    @classmethod
    def launched(cls) -> "Process | None":
        """What the launcher says, or None for a process that was started by hand."""
        env = os.environ
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        node = f"{platform.node()}:{env['GROUP_RANK']}" if "GROUP_RANK" in env else platform.node()
        return cls(rank, world, int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", world)), node)


def prepare_launch(nproc: int) -> None:
    """Set what `nproc` workers on this machine inherit: a fair share of the cores, this process as their parent."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ[PARENT] = str(os.getpid())
    prepare_caches()


def prepare_vllm(gpus: int) -> None:
    """What vLLM reads when it is imported: no reports home, and one process where one GPU is enough.

    Its limit may be a token past the model's, since it generates a token after every sequence that it scores.
    """
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    if gpus == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def prepare_caches() -> None:
    """Keep compiled kernels on this node's own disk, where no other user writes: home folders are shared and slow."""
    owner = os.getuid() if hasattr(os, "getuid") else 0
    folder = os.path.join(tempfile.gettempdir(), f"mtraining-{owner}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.lstat(folder).st_uid != owner or os.path.islink(folder):
        raise UserError(
            f"compiled kernels are kept in {folder}, which belongs to somebody else; set TMPDIR to a folder of your own"
        )
    for name, value in CACHES.items():
        os.environ.setdefault(name, value.format(folder))


def has_parent() -> bool:
    """Whether `launch.py` started this process and reports its errors."""
    return PARENT in os.environ


def error_file() -> str | None:
    """Where the launcher wants the error of this process."""
    return os.environ.get(ERROR_FILE)


def end_with_parent() -> None:
    """Make Linux kill this worker when the launcher is killed, else it would go on writing checkpoints alone."""
    if not has_parent() or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # it was killed before the call
        os._exit(1)
