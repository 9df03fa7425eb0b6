"""The order in which keys travel around a ring, and how the gradients of keys come home.

O outer steps of I inner ones; a flat ring has O = 1. Rank (node, local) has the keys of rank

    ((node - i) mod O, (local - j) mod I)          at outer step i, inner step j

Keys for the next node leave at the start of an outer step and travel under its inner steps, on links of their own.
Within a node keys go around hop by hop (mode "ring"), or straight to every rank, so that one hop has the keys of
several (mode "gather"). A forward pass begins with a rank's own keys, under which the first others come. A backward
pass ends with them: sums of dK and dV, twice as many bytes as keys, come home under the last hop.
Sums follow the keys around (ring) or go straight home (gather), then along the outer circle while the next inner steps
are computed. Source: MTraining, algorithm 2, with the node's offset in the inner neighbour and steps counted from 0.

    2 nodes of 2, rank 0      ring, forward     ring, backward      gather, forward    gather, backward
    inner steps               0 1  0 1          0 1  1 0            0 1  0 1           0 1  1 0
    keys of ranks             0 1  2 3          2 3  1 0            0 1  2 3           2 3  1 0

    1 node of 4, rank 0       0 | 1 | 2 | 3     1 | 2 | 3 | 0       0 | 1 2 3          1 2 3 | 0    as inner steps
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mtraining_nns.ops.ring import Exchange, Ring, Swap

HOP_BYTES = 1 << 30  # of keys and values that one gathered hop has, unless one rank has more
KV = tuple[torch.Tensor, torch.Tensor]


class Hop(NamedTuple):
    """Keys and values [B, n * S, H, D] of n ring ranks end to end; first, last: in the order of the pass.

    outer, inner: the outer step, and of each rank the inner one; inner step 0 has what the outer circle brought.
    """

    sources: tuple[int, ...]
    kv: KV
    first: bool
    last: bool
    outer: int
    inner: tuple[int, ...]


class Journey:
    """The keys of every rank on their way past this one; the first others are sent for at once.

    Iterate once. A hop's tensors live until the next hop. own_last: end with this rank's own keys, for backward passes.
    name: of the keys, for error messages.
    """

    def __init__(self, ring: Ring, k: torch.Tensor, v: torch.Tensor, name: str, *, own_last: bool = False):
        self.ring, self.own, self.name, self.own_last = ring, (k, v), name, own_last
        self.outer, self.inner = ring.levels
        self.groups = _groups(ring, k)
        self.ahead = self._send_for(0, 0, self.own) if self.groups else None

    def __iter__(self) -> Iterator[Hop]:
        steps, order = self.outer.world, range(self.outer.world)
        shard, along = self.own, Exchange(self.outer, f"{self.name}, between nodes")
        if self.own_last and steps > 1:
            order = (*range(1, steps), 0)
            shard = self._start_along(along, self.own)
            along.wait()
        for turn, i in enumerate(order):
            last_turn = turn + 1 == steps
            coming = None if last_turn or order[turn + 1] == 0 else self._start_along(along, shard)
            own_last = self.own_last and last_turn
            for first, last, inner, kv in self._around(i, self.own if i == 0 else shard, own_last):
                sources = tuple(self.ring.source(i, j) for j in inner)
                yield Hop(sources, kv, turn == 0 and first, last_turn and last, i, inner)
            if coming is not None:
                along.wait()
                shard = coming

    def _start_along(self, along: Exchange, shard: KV) -> KV:
        """Send a shard on to the next node; what comes of the one before, there after `along.wait`."""
        coming = tuple(torch.empty_like(x) for x in shard)
        along.start(*map(Swap, shard, coming))
        return coming

    def _around(self, i: int, shard: KV, own_last: bool) -> Iterator[tuple[bool, bool, tuple[int, ...], KV]]:
        """(first, last, inner steps, keys and values) of one outer step."""
        order = [*self.groups, (0,)] if own_last else [(0,), *self.groups]
        fetch = None
        if self.groups:
            fetch = self.ahead if i == 0 else self._send_for(i, 0, shard)
        number = 0
        for turn, group in enumerate(order):
            here = shard
            if group != (0,):
                here = fetch.wait()
                number += 1
                if number < len(self.groups):
                    fetch = self._send_for(i, number, here if self.ring.mode == "ring" else shard)
            yield turn == 0, turn + 1 == len(order), group, _end_to_end(here)

    def _send_for(self, i: int, number: int, sent: KV) -> "Fetch":
        """The keys of one group of inner steps; sent: what other ranks get for theirs."""
        group = self.groups[number]
        what = f"{self.name}, hop {i * len(self.groups) + number + 1}"
        return Fetch(self.inner, what, sent, group if self.ring.mode == "gather" else (1,))


class Fetch:
    """Keys and values of ranks `distances` back in a circle, under way; this rank's go as many places on."""

    def __init__(self, circle, what: str, sent: KV, distances: tuple[int, ...]):
        self.exchange = Exchange(circle, what)
        self.arriving = tuple(torch.empty(len(distances), *x.shape, dtype=x.dtype, device=x.device) for x in sent)
        self.exchange.start(
            *(Swap(x, into[m], ahead) for m, ahead in enumerate(distances) for x, into in zip(sent, self.arriving))
        )

    def wait(self) -> KV:
        """[n, B, S, H, D] each."""
        self.exchange.wait()
        return self.arriving if len(self.arriving[0]) > 1 else tuple(x[0] for x in self.arriving)


def _groups(ring: Ring, k: torch.Tensor) -> list[tuple[int, ...]]:
    """Inner steps after the first, by hops."""
    steps = range(1, ring.levels[1].world)
    most = max(1, HOP_BYTES // (2 * k.numel() * k.element_size())) if ring.mode == "gather" else 1
    return [tuple(steps[first : first + most]) for first in range(0, len(steps), most)]


def _end_to_end(kv: KV) -> KV:
    """[n, B, S, H, D] -> [B, n * S, H, D]; a single rank's [B, S, H, D] stays."""
    return tuple(x if x.dim() == 4 else x.transpose(0, 1).flatten(1, 2) for x in kv)


class Homeward:
    """Sums of dK and dV in fp32 on their way to the ranks that own the keys. Call `add` after each hop.

    For journeys that end with a rank's own keys.
    """

    def __init__(self, ring: Ring, layer: int):
        self.ring, self.layer = ring, layer
        self.outer, self.inner = ring.levels
        self.hops = 0
        self.step: int | None = None  # the outer one
        self.parts: list[tuple[Exchange, torch.Tensor]] = []  # of this outer step: what comes, and where it arrives
        self.own: torch.Tensor | None = None  # of this outer step: what stays
        self.along = Exchange(self.outer, f"gradients of keys of layer {layer}, between nodes")
        self.arriving: torch.Tensor | None = None  # along the outer circle

    def add(self, hop: Hop, dkv: torch.Tensor) -> None:
        """dkv [2, B, n * S, H, D]: what this rank found for the keys of the hop; it may be overwritten."""
        if self.ring.world == 1:
            self.own = dkv
            return
        if self.step not in (None, hop.outer):
            self._leave_node()
        self.step = hop.outer
        self.hops += 1
        if self.ring.mode == "gather":
            self._send_home(hop, dkv)
        else:
            self._pass_on(hop, dkv)

    def finish(self) -> torch.Tensor:
        """[2, B, S, H, D], fp32 unless the ring is a single rank: the sum over all ranks for this rank's own keys."""
        if self.ring.world == 1:
            return self.own
        total = self._collected()
        if self.arriving is not None:
            self.along.wait()
            total += self.arriving
        return total

    def _pass_on(self, hop: Hop, dkv: torch.Tensor) -> None:
        """Add what the ranks before this one found for the same keys, and pass the sum on, at last home."""
        total = dkv.float().contiguous()
        if self.parts:
            total += self._arrived()
        if hop.last or self.inner.world == 1:
            self.own = total
        else:
            self._start(total, ahead=1)

    def _send_home(self, hop: Hop, dkv: torch.Tensor) -> None:
        """Straight to the ranks whose keys they are; what others found for this rank's keys comes meanwhile."""
        if hop.inner == (0,):
            self.own = dkv.float().contiguous()
            return
        for place, part in zip(hop.inner, dkv.unflatten(2, (len(hop.inner), -1)).unbind(2)):
            self._start(part.float().contiguous(), ahead=-place)

    def _start(self, dkv: torch.Tensor, ahead: int) -> None:
        exchange = Exchange(self.inner, f"gradients of keys of layer {self.layer}, hop {self.hops}")
        arriving = torch.empty_like(dkv)
        exchange.start(Swap(dkv, arriving, ahead))
        self.parts.append((exchange, arriving))

    def _arrived(self) -> torch.Tensor:
        exchange, arriving = self.parts.pop(0)
        exchange.wait()
        return arriving

    def _collected(self) -> torch.Tensor:
        """All that was found in this node for the keys that the outer circle brought."""
        total = self.own if self.own is not None else self._arrived()
        while self.parts:
            total += self._arrived()
        self.own = None
        return total

    def _leave_node(self) -> None:
        """An outer step is over: its sums are home within the node, and go on along the outer circle."""
        total = self._collected()
        if self.arriving is not None:
            self.along.wait()
            total += self.arriving
        self.arriving = torch.empty_like(total)
        self.along.start(Swap(total, self.arriving))
