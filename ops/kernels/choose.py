"""Which kernel backend runs on a device. Not in the package file, where a backend's name would hide its library."""

import importlib
import importlib.util

import torch

KERNELS = {"torch": "mtraining_nns.ops.kernels.torch", "triton": "mtraining_nns.ops.kernels.triton"}


def choose_backend(device_type: str, backend: str = "auto") -> tuple[str, str]:
    """(name, reason). Raises ValueError where the backend that was asked for cannot run on the device."""
    if backend == "torch" or (backend == "auto" and device_type != "cuda"):
        return "torch", "asked for" if backend == "torch" else f"the backend for {device_type} devices"
    if device_type != "cuda":
        raise ValueError(
            f"attention.backend={backend} needs a CUDA device, got {device_type}; use attention.backend=torch or auto"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError("no attention kernels for CUDA: triton is not installed; pip install triton")
    if torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(
            f"the triton backend needs compute capability 8.0 or newer, got {torch.cuda.get_device_capability()};"
            " use attention.backend=torch"
        )
    return "triton", "asked for" if backend == "triton" else "the default for CUDA devices"


def load(backend: str):
    """The module of a backend by its name in KERNELS."""
    return importlib.import_module(KERNELS[backend])
