"""The ring of ranks that share one sequence, and its double-buffered exchange.

Build rings once at start (`Ring.create`), never inside the operator: creating a process group is collective over the
whole world. At step t a rank works on the keys of source (rank - t) mod world while the next are under way:

    rank 0:  K0  K3  K2  K1        every step sends to rank + 1 and receives from rank - 1
    rank 1:  K1  K0  K3  K2
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ring:
    """Ranks of one sequence. `rank` and `world` count inside the ring; `ranks` are the global ranks in ring order."""

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    @property
    def world(self) -> int:
        return len(self.ranks)

    @classmethod
    def single(cls) -> "Ring":
        """A ring of one: no process group, no communication."""
        return cls()

    @classmethod
    def create(cls, size: int, timeout: timedelta | None = None) -> "Ring":
        """Cut the world into rings of `size` neighbouring ranks, connect them, and return this rank's ring.

        Collective: every rank of the world calls it once, with the same size. `timeout` is how long an exchange may
        take before it is an error. Raises ValueError if the world cannot be cut.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if size < 1 or world % size:
            raise ValueError(f"rings of {size} ranks need a multiple of {size} processes, got {world}")
        if size == 1:
            return cls.single()
        mine = None
        for first in range(0, world, size):
            ranks = tuple(range(first, first + size))
            group = dist.new_group(list(ranks), timeout=timeout)
            if dist.get_rank() in ranks:
                mine = cls(ranks.index(dist.get_rank()), ranks, group)
        mine._connect()
        return mine

    def _connect(self) -> None:
        """First exchange, so that connections are made in one order on all ranks and not inside a training step."""
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        sent, received = torch.full((1,), self.rank, device=device), torch.zeros(1, dtype=torch.long, device=device)
        exchange = Exchange(self)
        exchange.start(sent, received)
        exchange.wait()
        expected = (self.rank - 1) % self.world
        assert received.item() == expected, f"ring {self.ranks}: got {received.item()} from rank {expected}"

    def __deepcopy__(self, memo) -> "Ring":
        return self  # a ring is a place among processes; a copy of a model stands in the same one

    def source(self, step: int) -> int:
        """Ring rank whose keys this rank holds at `step`."""
        return (self.rank - step) % self.world

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ring, in place."""
        if self.world > 1:
            assert x.is_contiguous(), "collectives take contiguous tensors"
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks in ring order."""
        if self.world == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts


class Exchange:
    """One buffer on its way to the next rank while another arrives from the previous one."""

    def __init__(self, ring: Ring):
        self.ring, self.pending, self.buffers = ring, [], ()

    def start(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        """Post both transfers; neither buffer may be touched before `wait`."""
        ring = self.ring
        following, previous = ring.ranks[(ring.rank + 1) % ring.world], ring.ranks[(ring.rank - 1) % ring.world]
        self.buffers = send, receive  # alive until both have arrived
        self.pending = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, following, ring.group),
                dist.P2POp(dist.irecv, receive, previous, ring.group),
            ]
        )

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending, self.buffers = [], ()
