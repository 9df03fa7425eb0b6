"""Kernel backends. Each is a module with the same four names, loaded only when asked for.

    forward(q, keys, *, scale, carry=None, out_dtype=None) -> Partial
    backward(q, keys, tape, *, carry=None, dq_dtype=None) -> Grads
    workspace_bytes(q, k, block, columns) -> int      of one key head, backward; columns: C
    CAUSAL_WITHOUT_LISTS: bool                        whether BlockIndex.causal will do

Shapes: q [B, Sq, N, D]; keys.k, keys.v [B, Sk, H, D] with N a multiple of H, never expanded. `carry` is what other
keys of the same queries gave, a Partial or dq in fp32, and is joined in; fp32 is the default dtype of out and dq.
"""

from mtraining_nns.ops.kernels.backends import KERNELS, Device, Work, choose, load
from mtraining_nns.ops.kernels.contract import GatheredColumns, Grads, Keys, Tape

__all__ = ["KERNELS", "Device", "GatheredColumns", "Grads", "Keys", "Tape", "Work", "choose", "load"]
