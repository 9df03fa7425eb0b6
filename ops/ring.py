"""The ring of ranks that share one sequence: who passes buffers to whom, in one level or in two.

Build rings once at start (`Ring.create`), never inside the operator: creating a process group is collective over the
whole world. `ops/hops.py` says in which order keys travel.

    ring of 6, flat           0 > 1 > 2 > 3 > 4 > 5 > 0, one inner circle
    ring of 6, inner 3        inner circles 0 > 1 > 2 > 0 and 3 > 4 > 5 > 3, one a node
                              outer circles 0 > 3 > 0, 1 > 4 > 1 and 2 > 5 > 2, between nodes
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mtraining_nns.ops import clock
from mtraining_nns.ops.watch import Watch

MODES = ("ring", "gather")  # how keys get around an inner circle
WARM_UP = 1 << 20  # numbers in a large sum, for which a library may connect ranks in another way than for a small one


class RingError(RuntimeError):
    """An exchange between ranks failed: a peer died, stalled, or sent something else than was expected."""


@dataclass(frozen=True)
class Circle:
    """Ranks that pass buffers to the next one. `rank` counts inside the circle; `ranks` are global, in order."""

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    watch: Watch | None = None  # of transfers between GPUs

    @property
    def world(self) -> int:
        return len(self.ranks)

    def _collect(self, collective, *tensors, result, what: str) -> "Pending":
        """`result`, under way by a collective of all ranks."""
        what = f"{what} over ranks {self.ranks}, this is rank {self.ranks[self.rank]}"
        with blaming(what):
            work = collective(*tensors, group=self.group, async_op=True)
        return Pending(result, work, self, what)

    def arrived(self, work: dist.Work, what: str) -> None:
        """Wait for a transfer; on a GPU that queues the wait. what: for error messages."""
        with blaming(what), clock.span("wait"):
            work.wait()
        if self.watch is not None:
            event = torch.cuda.Event()
            event.record()
            self.watch.expect(event, placed(what))

    def __deepcopy__(self, memo):
        return self  # a place among processes; a copy of a model stands in the same one


@dataclass(frozen=True)
class Ring(Circle):
    """Ranks of one sequence, in ring order.

    inner, outer: the circles on which keys travel; their connections are their own, so that keys and sums over the ring
    do not wait for each other. A flat ring has no outer one. mode: how keys get around the inner circle, hop by hop
    ("ring") or straight to every rank ("gather").
    """

    inner: Circle | None = None
    outer: Circle | None = None
    mode: str = "ring"

    @classmethod
    def single(cls) -> "Ring":
        """A ring of one: no process group, no communication."""
        return cls()

    @classmethod
    def create(cls, size: int, timeout: timedelta | None = None, *, inner: int | None = None, mode="ring", watch=None):
        """Cut the world into rings of `size` neighbouring ranks, connect them, and return this rank's ring.

        inner: ranks of an inner circle, a divisor of size; None for a flat ring. watch: sees to it that transfers
        between GPUs end. Collective: every rank of the world calls it once, with the same arguments. `timeout` is how
        long an exchange may take before it is an error. Raises ValueError if the world cannot be cut.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if size < 1 or world % size:
            raise ValueError(f"rings of {size} ranks need a multiple of {size} processes, got {world}")
        if inner is not None and (inner < 1 or size % inner):
            raise ValueError(f"inner circles of {inner} ranks need a ring of a multiple of {inner} ranks, got {size}")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode}")
        if size == 1:
            return cls.single()
        rings = [tuple(range(first, first + size)) for first in range(0, world, size)]
        connect = partial(_circle, timeout=timeout, watch=watch)
        whole, width = connect(rings), inner or size
        levels = {"inner": connect([ring[i : i + width] for ring in rings for i in range(0, size, width)])}
        if inner is not None:
            levels["outer"] = connect([ring[i::inner] for ring in rings for i in range(inner)])
        ring = cls(whole.rank, whole.ranks, whole.group, watch, **levels, mode=mode)
        ring._warm_up()
        return ring

    @property
    def levels(self) -> tuple[Circle, Circle]:
        """(outer, inner); a flat ring is one inner circle."""
        return self.outer or Circle(), self.inner or self

    @property
    def node_size(self) -> int | None:
        """Ranks of a node, None where all are of one."""
        return None if self.levels[0].world == 1 else self.inner.world

    def source(self, outer_step: int, inner_step: int) -> int:
        """Ring rank whose keys this rank holds at a step."""
        outer, inner = self.levels
        return (outer.rank - outer_step) % outer.world * inner.world + (inner.rank - inner_step) % inner.world

    def _warm_up(self) -> None:
        """Every kind of transfer once, in one order on all ranks: connections are not made inside a training step."""
        outer, inner = self.levels
        everybody = range(1, inner.world) if self.mode == "gather" else (1,)
        for circle, places in ((outer, (1,)), (inner, everybody)):
            if circle.world > 1:
                _connect(circle, places)
        for length in (1, WARM_UP):
            self.sum(torch.zeros(length, dtype=torch.float32, device=_device(self)))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ring, in place."""
        return self.start_sum(x).wait()

    def start_sum(self, x: torch.Tensor) -> "Pending":
        """The same, under way until `wait`."""
        if self.world == 1:
            return Pending(x)
        assert x.is_contiguous(), "collectives take contiguous tensors"
        return self._collect(dist.all_reduce, x, result=x, what="a sum")

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks in ring order."""
        if self.world == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.world)]
        return self._collect(dist.all_gather, parts, x.contiguous(), result=parts, what="gathering").wait()


@dataclass(frozen=True)
class Pending:
    """A tensor, or several, there after `wait`. what: for error messages."""

    result: Any
    work: dist.Work | None = None
    circle: Circle | None = None
    what: str = ""

    def wait(self):
        if self.work is not None:
            self.circle.arrived(self.work, self.what)
        return self.result


class Swap(NamedTuple):
    """Send a buffer `ahead` places on in a circle while another arrives from as many places back."""

    send: torch.Tensor
    receive: torch.Tensor
    ahead: int = 1


class Exchange:
    """Buffers on their way to other ranks of a circle while others arrive. what: for error messages."""

    def __init__(self, circle: Circle, what: str):
        self.circle, self.what = circle, what
        self.pending, self.swaps = [], ()

    def start(self, *swaps: Swap) -> None:
        """Touch no buffer before `wait`; every rank of the circle gives the same places in the same order."""
        if not swaps:
            return
        circle, sends, receives = self.circle, {}, {}
        operations = []
        for send, receive, ahead in swaps:
            to, by = (circle.ranks[(circle.rank + step) % circle.world] for step in (ahead, -ahead))
            sends[to], receives[by] = True, True
            operations += [
                dist.P2POp(dist.isend, send, to, circle.group),
                dist.P2POp(dist.irecv, receive, by, circle.group),
            ]
        self.blame = (
            f"{self.what}: rank {circle.ranks[circle.rank]} sends to {_ranks_text(sends)}"
            f" and receives from {_ranks_text(receives)}"
        )
        self.swaps = swaps  # alive until all have arrived
        with blaming(self.blame):
            self.pending = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        for work in self.pending:
            self.circle.arrived(work, self.blame)
        self.pending, self.swaps = [], ()


def _ranks_text(ranks) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_places: ContextVar[tuple[str, ...]] = ContextVar("places", default=())


@contextmanager
def placing(what: str):
    """Around work with transfers in it: their errors, and the watch, say that they belong to it."""
    token = _places.set((*_places.get(), what))
    try:
        yield
    finally:
        _places.reset(token)


def placed(what: str) -> str:
    """`what`, and within which work."""
    return ": ".join((*_places.get(), what))


@contextmanager
def blaming(what: str):
    """Around the calls of one transfer alone: their errors say which one it was."""
    try:
        yield
    except RuntimeError as error:
        raise RingError(f"{placed(what)}; a peer died, stalled or holds another length: {error}") from error


def _circle(circles: list[tuple[int, ...]], timeout: timedelta | None, watch: Watch | None) -> Circle:
    """Make groups of all circles, in one order on all ranks, and return this rank's."""
    mine = None
    for ranks in circles:
        group = dist.new_group(list(ranks), timeout=timeout, pg_options=_group_options())
        if dist.get_rank() in ranks:
            mine = Circle(ranks.index(dist.get_rank()), ranks, group, watch)
    return mine


def _group_options():
    """Transfers are short and waited for: on GPUs their blocks run before those of kernels that are queued already."""
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _connect(circle: Circle, places) -> None:
    """An exchange with each of the ranks that lie so many places on."""
    sent = torch.full((1,), circle.rank, device=_device(circle))
    received = [torch.full_like(sent, -1) for _ in places]
    exchange = Exchange(circle, "connecting the ring")
    exchange.start(*(Swap(sent, into, ahead) for into, ahead in zip(received, places)))
    exchange.wait()
    expected = [(circle.rank - ahead) % circle.world for ahead in places]
    assert [x.item() for x in received] == expected, f"circle {circle.ranks}: got {received} from ranks {expected}"


def _device(circle: Circle) -> str:
    return "cuda" if dist.get_backend(circle.group) == "nccl" else "cpu"
