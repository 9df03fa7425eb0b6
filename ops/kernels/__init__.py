"""Kernel backends. Each is a module with the same six names, loaded only when asked for.

    forward(q, keys, *, scale, carry=None, into=None) -> Partial
    begin(q, tape) -> carry                         of the first backward call: what needs no keys
    backward(q, keys, tape, *, carry, into=None) -> Grads
    workspace_bytes(size, *, backward) -> int       of one key head and its query heads, beside their results
    front_rows(size, *, backward) -> int            rows before the keys, into which the backend puts columns
    TRAITS: Traits

Shapes: q [B, Sq, N, D]; keys.k, keys.v [B, Sk, H, D] with N a multiple of H, never expanded. `carry` is what other
keys of the same queries gave, a Partial or the dq of Grads, and is joined in. The last call of a pass says where out or
dq goes: `into` [B, Sq, N, D], a slice of more heads perhaps. The others give an out that loses nothing and whatever dq
the backend carries.
"""

from mtraining_nns.ops.kernels.backends import KERNELS, Device, Work, choose, load
from mtraining_nns.ops.kernels.contract import GatheredColumns, Grads, Keys, Size, Tape, Traits

__all__ = [
    "KERNELS", "Device", "GatheredColumns", "Grads", "Keys", "Size", "Tape", "Traits", "Work", "choose", "load"
]  # fmt: skip
