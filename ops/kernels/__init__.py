"""Kernel backends. Each is a module with the same five names, loaded only when asked for.

    forward(q, keys, *, scale, carry=None, out_dtype=None) -> Partial
    begin(q, tape) -> carry                           of the first backward call: what needs no keys
    backward(q, keys, tape, *, carry, dq_dtype=None) -> Grads
    workspace_bytes(q, k, block, columns) -> int      of one key head, backward; columns: C
    CAUSAL_WITHOUT_LISTS: bool                        whether BlockIndex.causal will do

Shapes: q [B, Sq, N, D]; keys.k, keys.v [B, Sk, H, D] with N a multiple of H, never expanded. `carry` is what other
keys of the same queries gave, a Partial or the dq of Grads, and is joined in. Without a dtype, out is whatever loses
nothing and dq whatever the backend carries; the last call of a pass names one.
"""

from mtraining_nns.ops.kernels.backends import KERNELS, Device, Work, choose, choose_backward, load
from mtraining_nns.ops.kernels.contract import GatheredColumns, Grads, Keys, Tape

__all__ = ["KERNELS", "Device", "GatheredColumns", "Grads", "Keys", "Tape", "Work", "choose", "choose_backward", "load"]
