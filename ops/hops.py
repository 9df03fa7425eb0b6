"""The order in which keys travel around a ring; `ops/homeward.py` brings their gradients home.

O outer steps of I inner ones; a flat ring has O = 1. Rank (node, local) has the keys of rank

    ((node - i) mod O, (local - j) mod I)          at outer step i, inner step j

Keys for the next node leave at the start of an outer step and travel under its inner steps, on links of their own.
Within a node there are two modes:

    ring      keys go around hop by hop, and so do the sums of their gradients. A forward pass begins with a rank's own
              keys, under which the first others come. A backward pass ends with them: sums come home under the last hop
    gather    keys go straight to every rank, the heads in pieces: a hop has the keys of all ranks of a node for some
              heads, and the next piece comes meanwhile. What a rank finds for the keys of others goes straight home.
              Where else there would be nothing to do meanwhile, when a backward pass begins and when it ends, own keys
              are a hop by themselves; a forward pass has the estimate before it

Between nodes sums follow the keys along the outer circle while the next steps are computed; what the ranks of a node
found is added up before. Source: MTraining, algorithm 2, with the node's offset in the inner neighbour and steps
counted from 0.

    2 nodes of 2, rank 0      ring, forward     ring, backward      gather, forward           gather, backward
    pieces of heads           all of them                           a, b                      a, b
    keys of ranks             0 | 1 | 2 | 3     2 | 3 | 1 | 0       a01 b01 a23 b23           a0 a1 a23 b23 b1 b0
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from mtraining_nns.ops.ring import Exchange, Ring, Swap

KV = tuple[torch.Tensor, torch.Tensor]


class Arrived(NamedTuple):
    """Keys and values [B, n * S, h, D] of n ring ranks end to end.

    front: [2, B, rows + n * S, h, D] whose last rows are the keys and values, or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    front: torch.Tensor | None = None


class Hop(NamedTuple):
    """Keys of some ranks, this one before others, and of some heads.

    arrive: waits for them, and sends for the next ones; call it once. piece: which of the journey's heads.
    outer, inner: the outer step, and of each rank the inner one; inner step 0 has what the outer circle brought.
    first, last: of these heads, in the order of the pass. columns: the hop of these heads with which columns are
    treated, so that they have time to come, or their gradients to get home.
    """

    sources: tuple[int, ...]
    arrive: Callable[[], Arrived]
    piece: int
    outer: int
    inner: tuple[int, ...]
    first: bool
    last: bool
    columns: bool


class Journey:
    """The keys of every rank on their way past this one; the first others are sent for at once.

    Iterate once. What arrives lives until the next hop. name: of the keys, for error messages. pieces: key heads that
    are treated at once. backward: in the order of backward passes. front: rows to leave before gathered keys in hops
    with columns. apart: own keys are always a hop by themselves.
    """

    def __init__(
        self, ring: Ring, k: torch.Tensor, v: torch.Tensor, name: str, *,
        pieces: Sequence[slice] = (slice(None),), backward: bool = False, front: int = 0, apart: bool = False,
    ):  # fmt: skip
        self.ring, self.own, self.name, self.pieces = ring, (k, v), name, pieces
        self.backward, self.front, self.apart = backward, front, apart
        self.outer, self.inner = ring.levels
        self.along = Exchange(self.outer, f"{name}, between nodes")
        self.hops = self._gathered() if ring.mode == "gather" and ring.world > 1 else self._around_circles()
        next(self.hops)  # sends for the first keys

    def __iter__(self) -> Iterator[Hop]:
        return self.hops

    def _send_on(self, shard: KV) -> KV:
        """A shard to the next node; what comes of the one before, there after `along.wait`."""
        coming = tuple(torch.empty_like(x) for x in shard)
        self.along.start(*map(Swap, shard, coming))
        return coming

    def _around_circles(self) -> Iterator[Hop | None]:
        """First None, then hops of single ranks."""
        steps, order = self.outer.world, range(self.outer.world)
        ahead = self._fetch(0, 1, self.own)
        yield None
        shard = self.own
        if self.backward and steps > 1:
            order = (*range(1, steps), 0)
            shard = self._send_on(self.own)
            self.along.wait()
        for turn, i in enumerate(order):
            last_turn = turn + 1 == steps
            coming = None if last_turn or order[turn + 1] == 0 else self._send_on(shard)
            here, fetch = (self.own, ahead) if i == 0 else (shard, self._fetch(i, 1, shard))
            for first, last, j, arrive in self._around(i, here, fetch, own_last=self.backward and last_turn):
                first, last = turn == 0 and first, last_turn and last
                source, columns = self.ring.source(i, j), first if self.backward else last
                for c, heads in enumerate(self.pieces):
                    yield Hop((source,), functools.partial(arrive, heads), c, i, (j,), first, last, columns)
            if coming is not None:
                self.along.wait()
                shard = coming

    def _around(self, i: int, shard: KV, fetch, *, own_last: bool) -> Iterator[tuple[bool, bool, int, Callable]]:
        """(first, last, inner step, what waits for some heads) of one outer step."""
        steps, here, at = self.inner.world, shard, None

        def arrive(j: int, heads: slice) -> Arrived:
            nonlocal here, fetch, at
            if at != j:
                at, here = j, shard
                if j > 0:
                    fetch.wait()
                    here = fetch.arriving
                    fetch = self._fetch(i, j + 1, here) if j + 1 < steps else None
            return Arrived(*(x[:, :, heads] for x in here))

        for turn in range(steps):
            j = (turn + own_last) % steps
            yield turn == 0, turn + 1 == steps, j, functools.partial(arrive, j)

    def _fetch(self, i: int, j: int, sent: KV) -> "Fetch | None":
        if self.inner.world == 1:
            return None
        return Fetch(self.inner, f"{self.name}, hop {i * (self.inner.world - 1) + j}", sent)

    def _gathered(self) -> Iterator[Hop | None]:
        """First None, then hops of the ranks of a node."""
        order = self._order()
        places = [[n for n, stop in enumerate(order) if stop.piece == c] for c in range(len(self.pieces))]
        with_columns = {self._with_columns(order, ns) for ns in places}
        gathered = [n for n, stop in enumerate(order) if not stop.own]
        shards, newest, coming = {0: self.own}, 0, {}  # by outer step; the last of them; by place in the order

        def send_on(i: int) -> None:
            nonlocal newest
            if newest < i < self.outer.world:
                shards[i], newest = self._send_on(shards[i - 1]), i
                if i > 2:
                    del shards[i - 2]

        def gather(n: int) -> Gathering:
            i, c, inner = order[n]
            front, arrived = self.front if n in with_columns else 0, self.along.wait if i == newest else None
            return Gathering(self.inner, f"{self.name}, hop {n + 1}", shards[i], self.pieces[c], inner, front, arrived)

        def arrive(n: int) -> Arrived:
            if order[n].own:
                here = Arrived(*(x[:, :, self.pieces[order[n].piece]] for x in self.own))
            else:
                here = (coming.pop(n, None) or gather(n)).wait()
            send_on(order[n].outer + 1)
            after = next((m for m in gathered if m > n and m not in coming), None)
            # on a CPU, waiting for the keys of another node would hold up the work that they should come under
            if after is not None and not coming and (here.k.is_cuda or order[after].outer in (0, order[n].outer)):
                coming[after] = gather(after)
            return here

        send_on(order[0].outer)
        coming.update((n, gather(n)) for n in gathered[:1] if order[n].outer in shards)
        yield None
        for n, (i, c, inner) in enumerate(order):
            sources, ns = tuple(self.ring.source(i, j) for j in inner), places[c]
            arrived = functools.partial(arrive, n)
            yield Hop(sources, arrived, c, i, inner, n == ns[0], n == ns[-1], n in with_columns)

    def _order(self) -> list["Stop"]:
        """Hops that gather.

        Backward passes come to the keys of a rank's own node first with some heads, under which those of other nodes
        come, and last with the others, under which gradients come home.
        """
        pieces, steps = range(len(self.pieces)), tuple(range(self.inner.world))
        elsewhere = [Stop(i, c, steps) for i in range(1, self.outer.world) for c in pieces]
        early = len(pieces) // 2 if self.backward and elsewhere else len(pieces)

        def here(c: int) -> list[Stop]:
            parts = [steps]
            at_end = self.backward and c == pieces[-1]
            if len(steps) > 1 and (self.apart or (self.backward and c == 0) or at_end):
                parts = [steps[1:], steps[:1]] if at_end else [steps[:1], steps[1:]]
            return [Stop(0, c, inner) for inner in parts]

        before, after = ([stop for c in some for stop in here(c)] for some in (pieces[:early], pieces[early:]))
        return before + elsewhere + after

    def _with_columns(self, order: list["Stop"], places: list[int]) -> int:
        """At which of the places of some heads their columns are treated."""
        if not self.backward:
            return places[-1]
        return next((n for n in places if not order[n].own), places[0])


class Stop(NamedTuple):
    """Outer step, piece of heads and inner steps of a hop that gathers."""

    outer: int
    piece: int
    inner: tuple[int, ...]

    @property
    def own(self) -> bool:
        """Whether it has a rank's own keys alone."""
        return self.outer == 0 and self.inner == (0,)


class Fetch:
    """Keys and values of the rank before in a circle, under way; this rank's go to the one after."""

    def __init__(self, circle, what: str, sent: KV):
        self.exchange, self.arriving = Exchange(circle, what), tuple(torch.empty_like(x) for x in sent)
        self.exchange.start(*map(Swap, sent, self.arriving))

    def wait(self) -> None:
        """Until they have arrived."""
        self.exchange.wait()


class Gathering:
    """Keys and values of some heads of ranks so many places back in a circle, under way; 0 places are this rank's own.

    Ranks send to each other what they ask for themselves. shard: this rank's keys and values, of all heads; arrived:
    waits for them. On a GPU that happens on a stream of its own: the pass goes on meanwhile.
    """

    def __init__(self, circle, what: str, shard: KV, heads: slice, places: tuple[int, ...], front: int, arrived):
        self.shard = shard  # alive until it is sent
        own = tuple(x[:, :, heads] for x in shard)
        batch, length, *rest = own[0].shape
        both = torch.empty(2, batch, front + len(places) * length, *rest, dtype=own[0].dtype, device=own[0].device)
        self.arriving = Arrived(both[0, :, front:], both[1, :, front:], both if front else None)
        self.exchange = Exchange(circle, what)
        parts = dict(zip(places, both[:, :, front:].unflatten(2, (len(places), length)).unbind(2)))
        sent = parts[0] if 0 in parts else torch.empty_like(parts[places[0]], memory_format=torch.contiguous_format)
        with _aside(both.device):
            if arrived is not None:
                arrived()
            for into, x in zip(sent, own):
                into.copy_(x)
            self.exchange.start(*(swap for m in places if m for swap in swaps(sent, parts[m], m)))

    def wait(self) -> Arrived:
        """Until they have arrived."""
        self.exchange.wait()
        if self.arriving.k.is_cuda:
            torch.cuda.current_stream().wait_stream(_side_stream(self.arriving.k.device))
        self.shard = None
        return self.arriving


def swaps(send: torch.Tensor, receive: torch.Tensor, ahead: int) -> list[Swap]:
    """Of [2, B, ...], each part contiguous in itself."""
    return [Swap(x, y, ahead) for both in zip(send, receive) for x, y in zip(*both)]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _aside(device: torch.device):
    """After what is queued, beside what comes next."""
    if device.type != "cuda":
        return nullcontext()
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(side)
