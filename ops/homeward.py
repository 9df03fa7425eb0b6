"""How the gradients of keys come home to the ranks that own them; `ops/hops.py` says in which order keys travel."""

import torch

from mtraining_nns.ops.hops import Hop, swaps
from mtraining_nns.ops.ring import Exchange, Ring, Swap


class Homeward:
    """Sums of dK and dV on their way to the ranks that own the keys. Call `add` after each hop of a backward pass."""

    def __init__(self, ring: Ring, layer: int):
        self.ring, self.layer = ring, layer
        self.outer, self.inner = ring.levels
        self.hops = 0
        self.open: dict[int, _Step] = {}  # by piece
        self.own: dict[int, torch.Tensor] = {}  # by piece: what this node found for this rank's keys
        self.along: dict[int, tuple[Exchange, torch.Tensor]] = {}  # by piece: under way on the outer circle

    def add(self, hop: Hop, dkv: torch.Tensor) -> None:
        """dkv [2, B, n * S, h, D]: what this rank found for the keys of the hop; it may be overwritten."""
        if self.ring.world == 1:
            self.own[hop.piece] = dkv
            return
        # what was under way within the node came home under this hop
        for piece in [piece for piece, step in self.open.items() if step.hops == self.inner.world]:
            self._close(piece)
        self.hops += 1
        step = self.open.setdefault(hop.piece, _Step(hop.outer))
        step.hops += len(hop.inner)
        if self.ring.mode == "gather":
            self._send_home(step, hop, dkv)
        else:
            self._pass_on(step, dkv, last=hop.last)

    def finish(self) -> list[torch.Tensor]:
        """[2, B, S, h, D] of each piece: the sum over all ranks for this rank's own keys; fp32 if there are others."""
        for piece in list(self.open):
            self._close(piece)
        for piece, (exchange, arriving) in self.along.items():
            exchange.wait()
            self.own[piece] += arriving
        return [self.own[piece] for piece in sorted(self.own)]

    def _pass_on(self, step: "_Step", dkv: torch.Tensor, *, last: bool) -> None:
        """Add what the ranks before this one found for the same keys, and pass the sum on, at last home."""
        total = dkv.float().contiguous()
        if step.parts:
            total += step.arrived()
        if last or self.inner.world == 1:
            step.own = total
        else:
            self._start(step, [total], [1])

    def _send_home(self, step: "_Step", hop: Hop, dkv: torch.Tensor) -> None:
        """Straight to the ranks whose keys they are; what others found for this rank's keys comes meanwhile."""
        parts = dict(zip(hop.inner, dkv.unflatten(2, (len(hop.inner), -1)).unbind(2)))
        if 0 in parts:
            step.own = parts.pop(0).float().contiguous()
        if parts:
            self._start(step, list(parts.values()), [-place for place in parts])

    def _start(self, step: "_Step", sums: list[torch.Tensor], places: list[int]) -> None:
        exchange = Exchange(self.inner, f"gradients of keys of layer {self.layer}, hop {self.hops}")
        arriving = torch.empty(len(sums), *sums[0].shape, dtype=sums[0].dtype, device=sums[0].device)
        exchange.start(*(swap for each in zip(sums, arriving, places) for swap in swaps(*each)))
        step.parts.append((exchange, arriving))

    def _close(self, piece: int) -> None:
        """All that this node found for the keys of an outer step stays, or goes on along the outer circle."""
        step = self.open.pop(piece)
        total = step.arrived() if step.own is None else step.own
        while step.parts:
            total += step.arrived()
        if step.outer == 0:
            self.own[piece] = total
            return
        if piece in self.along:
            exchange, arriving = self.along.pop(piece)
            exchange.wait()
            total += arriving
        exchange = Exchange(self.outer, f"gradients of keys of layer {self.layer}, between nodes")
        arriving = torch.empty_like(total)
        exchange.start(Swap(total, arriving))
        self.along[piece] = exchange, arriving


class _Step:
    """One outer step of some heads: inner steps so far, what comes from other ranks of the node, and what stays.

    Sums are fp32; what a rank found comes as its kernels gave it.
    """

    def __init__(self, outer: int):
        self.outer, self.hops, self.own = outer, 0, None
        self.parts: list[tuple[Exchange, torch.Tensor]] = []  # of one rank or several

    def arrived(self) -> torch.Tensor:
        exchange, arriving = self.parts.pop(0)
        exchange.wait()
        return arriving[0] if len(arriving) == 1 else arriving.sum(0, dtype=torch.float32)
