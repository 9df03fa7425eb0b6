"""The index of a forward pass, kept until the backward pass runs that forward again.

Under activation checkpointing (`torch.utils.checkpoint`, use_reentrant=False) a layer's forward runs a second time
inside the backward pass. Estimating again would cost the estimate twice, put its collectives inside the
recomputation, and pick other columns where two masses tie. So the first run leaves its index here and the second
takes it back. The index of vertical-slash is a few megabytes at most, tiny beside a layer's activations; those of
XAttention and MoBA grow with the square of the length (see `RowIndex`).
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

Kept = Any  # what the operator kept of a call
MOST_PENDING = 8  # forward passes of one layer that may wait for their backward pass
OTHER_CALL = (
    "a recomputed forward pass took the index of another call of the same layer; with activation checkpointing, give"
    " each attention layer a number of its own, go back through the calls of a layer in the reverse order of their"
    " forward passes, and run forward passes without a backward pass under torch.no_grad"
)


class IndexStore:
    """Last-in first-out per layer, since the backward pass visits the calls of a layer in reverse order."""

    def __init__(self):
        self.pending: dict[int, list[tuple[int, Any, Kept]]] = {}
        self.tokens = itertools.count()

    def take_or_build(self, layer: int, sizes, build: Callable[[], Kept], *, keep: bool) -> tuple[int | None, Kept]:
        """(token, kept): inside a backward pass the stored one, else a new one, stored if `keep`; sizes: of the call.

        The token names the call, so that a backward pass can tell whether it got the index of its own forward pass.

        Raises RuntimeError in a backward pass that finds nothing: the forward ran without gradients (reentrant
        checkpointing), or more than MOST_PENDING forward passes of the layer came before. So it does where what it
        finds is of other sizes.
        """
        waiting = self.pending.setdefault(layer, [])
        if in_backward():
            if not waiting:
                raise RuntimeError(
                    f"layer {layer}: the forward pass that is being recomputed left no index; checkpoint activations"
                    f" with use_reentrant=False, no checkpoint inside another one, and at most {MOST_PENDING} forward"
                    " passes before their backward passes"
                )
            token, found, kept = waiting.pop()
            if found != sizes:
                raise RuntimeError(f"layer {layer}: {OTHER_CALL}; got {found}, expected {sizes}")
            return token, kept
        with torch.no_grad():
            kept = build()
        if not keep:
            return None, kept
        token = next(self.tokens)
        waiting.append((token, sizes, kept))
        del waiting[:-MOST_PENDING]
        return token, kept

    def drop(self, token: int | None) -> None:
        """Forget an index whose backward pass has come without a recomputation."""
        if token is not None:
            for waiting in self.pending.values():
                waiting[:] = [entry for entry in waiting if entry[0] != token]


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward pass."""
    return torch._C._current_graph_task_id() != -1
