"""The index of a forward pass, and its output if asked for, kept until the backward pass runs that forward again.

Under activation checkpointing (`torch.utils.checkpoint`, use_reentrant=False) a layer's forward runs a second time
inside the backward pass. Estimating again would cost the estimate twice, put its collectives inside the
recomputation, and pick other columns where two masses tie. So the first run leaves its index here and the second
takes it back. The index of vertical-slash is a few megabytes at most, tiny beside a layer's activations; those of
XAttention and MoBA grow with the square of the length (see `RowIndex`). With `attention.keep_output` the output of the
first run stays here, too, and the second one computes no attention: it brings back q, k and v alone.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from mtraining_nns.ops.merge import Partial

MOST_PENDING = 8  # forward passes of one layer that may wait for their backward pass
OTHER_CALL = (
    "a recomputed forward pass took the index of another call of the same layer; with activation checkpointing, give"
    " each attention layer a number of its own, go back through the calls of a layer in the reverse order of their"
    " forward passes, and run forward passes without a backward pass under torch.no_grad"
)


@dataclass
class Kept:
    """What a forward pass leaves for the one that repeats it; the token names the call, sizes are of its tensors."""

    token: int
    sizes: Any
    index: Any
    output: Partial | None = None
    version: int = 0  # of output.out, which a change in place raises

    def keep_output(self, output: Partial) -> None:
        """Leave the output of attention, too."""
        self.output = Partial(output.out.detach(), output.lse)  # what is returned becomes part of a graph
        self.version = output.out._version

    def unchanged_output(self) -> Partial:
        """The output; RuntimeError if the layer has written over it since."""
        if self.output.out._version != self.version:
            raise RuntimeError(
                "attention.keep_output=true keeps the output of attention, which was changed in place since; set it to"
                " false, or change a copy"
            )
        return self.output


class IndexStore:
    """Last-in first-out per layer, since the backward pass visits the calls of a layer in reverse order."""

    def __init__(self):
        self.pending: dict[int, list[Kept]] = {}
        self.tokens = itertools.count()

    def take(self, layer: int, sizes) -> Kept | None:
        """Inside a backward pass what the forward pass that is repeated has left; elsewhere None.

        Raises RuntimeError in a backward pass that finds nothing: the forward ran without gradients (reentrant
        checkpointing), or more than MOST_PENDING forward passes of the layer came before. So it does where what it
        finds is of other sizes.
        """
        if not in_backward():
            return None
        waiting = self.pending.get(layer)
        if not waiting:
            raise RuntimeError(
                f"layer {layer}: the forward pass that is being recomputed left no index; checkpoint activations"
                f" with use_reentrant=False, no checkpoint inside another one, and at most {MOST_PENDING} forward"
                " passes before their backward passes"
            )
        kept = waiting.pop()
        if kept.sizes != sizes:
            raise RuntimeError(f"layer {layer}: {OTHER_CALL}; got {kept.sizes}, expected {sizes}")
        return kept

    def keep(self, layer: int, sizes, index) -> Kept:
        """Leave the index of a forward pass. A backward pass can tell by its token whether it got its own."""
        waiting = self.pending.setdefault(layer, [])
        waiting.append(Kept(next(self.tokens), sizes, index))
        kept = waiting[-1]
        del waiting[:-MOST_PENDING]
        return kept

    def drop(self, token: int) -> None:
        """Forget what is left of a call whose backward pass has come without a recomputation."""
        for waiting in self.pending.values():
            waiting[:] = [kept for kept in waiting if kept.token != token]


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward pass."""
    return torch._C._current_graph_task_id() != -1
