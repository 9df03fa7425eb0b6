"""The order in which keys travel around a ring, and how the gradients of keys come home.

O outer steps of I inner ones; a flat ring has O = 1. Rank (node, local) has the keys of rank

    ((node - i) mod O, (local - j) mod I)          at outer step i, inner step j

Keys for the next node leave at the start of an outer step and travel under its I inner steps, on links of their own.
Within a node they go hop by hop, or (mode "gather") all of a node's keys come together. Sums of dK and dV follow the
keys: around the inner circle, home to the rank that the outer circle brought the keys to, and on along the outer
circle while the next inner steps are computed. Source: MTraining, algorithm 2, with the node's offset in the inner
neighbour and steps counted from 0.

    2 nodes of 2, rank 0        step (0,0) (0,1) (1,0) (1,1)
                                keys    0    1    2    3       of these ranks
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mtraining_nns.ops.ring import Exchange, Ring


class Hop(NamedTuple):
    """Keys and values [B, S, H, D] of ring rank `source`; `last`: no other ones follow."""

    source: int
    kv: tuple[torch.Tensor, torch.Tensor]
    last: bool


def circulate(ring: Ring, k: torch.Tensor, v: torch.Tensor, layer: int | str) -> Iterator[Hop]:
    """The keys of every rank, this one's first; later ones travel while the caller computes.

    A hop's tensors are overwritten after the next hop. layer: for error messages.
    """
    if ring.world == 1:
        yield Hop(0, (k, v), True)
        return
    outer, inner = ring.levels
    shard = torch.stack([k, v])  # what the outer circle brought
    coming = torch.empty_like(shard) if outer.world > 1 else None
    along = Exchange(outer, f"keys of layer {layer}, between nodes")
    around = _gathered if ring.mode == "gather" else _passed
    for i in range(outer.world):
        if i + 1 < outer.world:
            along.start(shard, coming)
        for j, kv in enumerate(around(ring, shard, layer, i)):
            yield Hop(ring.source(i, j), (kv[0], kv[1]), i + 1 == outer.world and j + 1 == inner.world)
        along.wait()
        shard, coming = coming, shard


def _passed(ring: Ring, shard: torch.Tensor, layer: int | str, outer_step: int) -> Iterator[torch.Tensor]:
    """The shards of an inner circle, each sent on while it is computed with."""
    outer, inner = ring.levels
    if inner.world == 1:
        yield shard
        return
    # the outer circle sends from `shard`: only without one may others arrive there
    spare = [torch.empty_like(shard), shard if outer.world == 1 else torch.empty_like(shard)]
    here = shard
    for j in range(inner.world):
        hop = outer_step * inner.world + j + 1
        exchange, target = Exchange(inner, f"keys of layer {layer}, hop {hop} of {ring.world - 1}"), spare[j % 2]
        if j + 1 < inner.world:
            exchange.start(here, target)
        yield here
        exchange.wait()
        here = target


def _gathered(ring: Ring, shard: torch.Tensor, layer: int | str, outer_step: int) -> Iterator[torch.Tensor]:
    """The shards of an inner circle: this rank's own while the others come together."""
    inner = ring.levels[1]
    whole = torch.empty(inner.world, *shard.shape, dtype=shard.dtype, device=shard.device)
    pending = inner.start_gather(whole, shard, f"keys of layer {layer}, outer step {outer_step + 1}")
    yield shard
    pending.wait()
    for j in range(1, inner.world):
        yield whole[(inner.rank - j) % inner.world]


class Homeward:
    """Sums of dK and dV in fp32 on their way to the ranks that own the keys. Call `add` after each hop."""

    def __init__(self, ring: Ring, layer: int):
        self.ring, self.layer = ring, layer
        self.hops = 0
        self.parts: list[tuple[Exchange, torch.Tensor]] = []  # of this outer step: what comes, and where it arrives
        self.own: torch.Tensor | None = None  # of this outer step: what this rank found or passed on last
        self.along = Exchange(ring.levels[0], f"gradients of keys of layer {layer}, between nodes")
        self.arriving: torch.Tensor | None = None  # along the outer circle

    def add(self, dkv: torch.Tensor) -> None:
        """dkv [2, B, S, H, D]: what this rank found for the keys of the hop; it may be overwritten."""
        inner = self.ring.levels[1]
        if self.ring.world == 1:
            self.own = dkv
            return
        i, j = divmod(self.hops, inner.world)
        if j == 0 and i > 0:
            self._leave_node()
        self.hops += 1
        dkv = dkv.float().contiguous()
        if self.ring.mode == "gather":
            self._send_home(dkv, j)
        else:
            self._pass_on(dkv, j)

    def finish(self) -> torch.Tensor:
        """[2, B, S, H, D], fp32 unless the ring is a single rank: the sum over all ranks for this rank's own keys."""
        if self.ring.world == 1:
            return self.own
        self._leave_node()
        if self.ring.levels[0].world == 1:
            return self.own
        self.along.wait()
        return self.arriving

    def _pass_on(self, dkv: torch.Tensor, j: int) -> None:
        """Add what the ranks before this one found for the same keys, and pass the sum on, at last home."""
        inner = self.ring.levels[1]
        if j > 0:
            dkv += self._arrived()
        self.own = dkv
        if inner.world > 1:
            self._start(dkv, ahead=1)

    def _send_home(self, dkv: torch.Tensor, j: int) -> None:
        """Straight to the rank whose keys they are; what others found for this rank's keys comes meanwhile."""
        if j == 0:
            self.own = dkv
        else:
            self._start(dkv, ahead=-j)

    def _start(self, dkv: torch.Tensor, ahead: int) -> None:
        exchange = Exchange(self.ring.levels[1], f"gradients of keys of layer {self.layer}, hop {self.hops}")
        arriving = torch.empty_like(dkv)
        exchange.start(dkv, arriving, ahead=ahead)
        self.parts.append((exchange, arriving))

    def _arrived(self) -> torch.Tensor:
        exchange, arriving = self.parts.pop(0)
        exchange.wait()
        return arriving

    def _leave_node(self) -> None:
        """An outer step is over: its sums are home within the node, and go on along the outer circle."""
        outer = self.ring.levels[0]
        if self.ring.mode == "gather":
            while self.parts:
                self.own += self._arrived()
        elif self.parts:
            self.own = self._arrived()
        if self.arriving is not None:
            self.along.wait()
            self.own += self.arriving
        if outer.world > 1:
            self.arriving = torch.empty_like(self.own) if self.arriving is None else self.arriving
            self.along.start(self.own, self.arriving)
