"""Stock nnScaler on CPUs and gloo, for tests and for compiling where there is no GPU.

    nnscaler_cpu.install()          before nnscaler.init() and before anything is traced; does nothing where CUDA is

nnScaler asks torch.cuda for its device, moves to "cuda" by name in a few modules, and starts NCCL. Where there is no
CUDA, this module answers with the CPU and gloo: patches on torch.cuda, on Tensor.cuda and Module.cuda, and on the name
`torch` inside three of nnScaler's modules. torch's own factories stay as they are, for the tracer keys on them.
"""

import importlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CPU = torch.device("cpu")
FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like")
NAMING_CUDA = ("nnscaler.parallel", "nnscaler.utils", "nnscaler.runtime.dtensor")  # they say device="cuda"
MEMORY_BYTES = 8 << 30  # what a device is said to have

_installed = False


def install() -> None:
    """Let nnScaler run on the CPU of this process, if there is no CUDA device."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _patch_cuda()
    _patch_process_group()
    for name in NAMING_CUDA:
        importlib.import_module(name).torch = _TorchOnCpu()


class _Nothing:
    """A stream or an event, and what is asked of them."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


class _TorchOnCpu:
    """torch, but factories that are told "cuda" take the CPU."""

    def __getattr__(self, name: str):
        found = getattr(torch, name)
        if name not in FACTORIES:
            return found

        def on_cpu(*args, **kwargs):
            if "device" in kwargs:
                kwargs["device"] = _device(kwargs["device"])
            return found(*args, **kwargs)

        return on_cpu


def _device(wanted):
    kind = wanted.type if isinstance(wanted, torch.device) else str(wanted).partition(":")[0]
    return CPU if kind == "cuda" else wanted


def _answer(value):
    """A function of its own for every name: torch.compile keeps a rule for each function of torch.cuda."""
    return lambda *args, **kwargs: value


def _patch_cuda() -> None:
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state"):
        setattr(cuda, name, _answer(None))
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated"):
        setattr(cuda, name, _answer(0))
    for name in ("default_stream", "current_stream", "stream"):
        setattr(cuda, name, _answer(_Nothing()))
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_device = _answer(CPU)
    cuda.get_rng_state = _answer(torch.zeros(0, dtype=torch.uint8))
    cuda.mem_get_info = _answer((MEMORY_BYTES, MEMORY_BYTES))
    cuda.get_device_properties = _answer(SimpleNamespace(name="cpu", total_memory=MEMORY_BYTES, major=0, minor=0))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _patch_process_group() -> None:
    start = dist.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return start("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
