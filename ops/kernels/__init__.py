"""Kernel backends. Each is a module with the same four functions, loaded only when asked for.

    blocks_forward(q, kv, index, *, scale, carry=None, out_dtype=None) -> Partial     kv = (k, v) of one rank
    blocks_backward(q, kv, index, tape, grads)                                        adds into grads
    columns_forward(q, kv, columns, q_starts, *, scale, carry=None) -> Partial        kv = gathered columns
    columns_backward(q, kv, columns, q_starts, tape, grads)                           adds into grads

Shapes: q [B, Sq, N, D]; k, v [B, Sk, H, D] with N a multiple of H, never expanded; gathered columns [B, N, C, D],
zero past the count. `carry` is attention over other keys of the same queries and is merged in.
"""

from typing import NamedTuple

from torch import Tensor

from mtraining_nns.ops.kernels.choose import KERNELS, choose_backend, load

__all__ = ["KERNELS", "Grads", "Tape", "choose_backend", "load"]


class Tape(NamedTuple):
    """What the backward pass needs of the whole attention, not of one step.

    dout [B, S, N, D]; lse fp32 [B, N, S]; delta fp32 [B, N, S] = rowsum(dout * out); scale of the scores.
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor
    scale: float


class Grads(NamedTuple):
    """fp32 accumulators: dq [B, Sq, N, D]; dk, dv of the same shape as the keys that the kernel was given."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
