"""Kernel backends. Each is a module with the same four functions, loaded only when asked for.

    blocks_forward(q, kv, index, *, scale, carry=None, out_dtype=None) -> Partial     kv = (k, v) of one rank
    blocks_backward(q, kv, index, tape, grads)                                        adds into grads
    columns_forward(q, kv, columns, q_starts, *, scale, carry=None) -> Partial        kv = gathered columns
    columns_backward(q, kv, columns, q_starts, tape, grads)                           adds into grads

Shapes: q [B, Sq, N, D]; k, v [B, Sk, H, D] with N a multiple of H, never expanded; gathered columns [B, N, C, D],
zero past the count. `carry` is attention over other keys of the same queries and is merged in.
"""

import importlib
import importlib.util
from typing import NamedTuple

import torch

KERNELS = {"torch": "mtraining_nns.ops.kernels.torch", "triton": "mtraining_nns.ops.kernels.triton"}


class Tape(NamedTuple):
    """What the backward pass needs of the whole attention, not of one step.

    dout [B, S, N, D]; lse fp32 [B, N, S]; delta fp32 [B, N, S] = rowsum(dout * out); scale of the scores.
    """

    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    scale: float


class Grads(NamedTuple):
    """fp32 accumulators: dq [B, Sq, N, D]; dk, dv of the same shape as the keys that the kernel was given."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


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
