"""Balance of a ring: what each rank computes at each hop, from the index alone, before a cluster is paid for.

    w[r, t]     query-key pairs of ring rank r at hop t, over all heads; columns belong to the last hop

    worker      max_r sum_t w / mean_r sum_t w           how long the others wait for the busiest rank at the end
    step        mean_r (max_t w[r] / mean_t w[r])        how much a rank's own hops differ
    critical    sum_t max_r w / mean_r sum_t w           time of a ring that waits at every hop, over a balanced one

    2 ranks     hop 0   hop 1       worker     4 / 3        = 1.33
    rank 0        3       1         step      (1.5 + 1) / 2 = 1.25
    rank 1        1       1         critical  (3 + 1) / 3   = 1.33

Pairs of blocks are counted by correlation along the distance of blocks, so no table over pairs of blocks is made: a
sequence of n blocks costs n log n for each rank. All counts are whole numbers in float64, hence exact.

A RowIndex holds the pairs of blocks anyway, and is counted from them, a head at a time: that of one rank for this rank,
that of a whole sequence for every rank of any layout. Another form of
index joins by an entry in PAIRS_BY_KEY. Not for the operator itself: `work` waits for the device.
Letters: R ranks asked for, W ranks of the ring, n global blocks with real tokens.
"""

from typing import NamedTuple

import torch

from mtraining_nns.ops.index import DistanceIndex, Index, RowIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Circle, Ring


class Balance(NamedTuple):
    """The three measures, each at least 1; 1 is perfect."""

    worker: float
    step: float
    critical: float


def measure(work: torch.Tensor) -> Balance:
    """Measures of a table w [..., W, hops]; leading dims are layers, which follow one another.

    Ranks of a ring meet in every layer, so each layer adds its own busiest rank. Ranks without a token do not count in
    `step`.
    """
    total = work.sum(-1)
    mean = total.mean(-1).sum()
    uneven = work.amax(-1) * work.shape[-1] / total
    return Balance(
        (total.amax(-1).sum() / mean).item(), uneven[total > 0].mean().item(), (work.amax(-2).sum() / mean).item()
    )


def schedule(world: int, inner: int | None = None) -> torch.Tensor:
    """int64 [W, hops]: the rank whose keys each rank holds at each hop, flat or in inner circles of `inner` ranks.

    >>> schedule(4, inner=2)[0].tolist()
    [0, 1, 2, 3]
    """
    return torch.tensor([sources(_member(rank, world, inner)) for rank in range(world)])


def sources(ring: Ring) -> list[int]:
    """The rank whose keys this rank holds, hop by hop."""
    outer, circle = ring.levels
    return [ring.source(i, j) for i in range(outer.world) for j in range(circle.world)]


def work(index: Index, layout: Layout, holds: torch.Tensor) -> torch.Tensor:
    """float64 [R, hops]: query-key pairs of R ranks at each hop, over all heads.

    holds: int64 [R, hops], rows of `schedule`; a rank's first hop is its own keys. The sum over the hops is
    `index.kept_pairs` of the rank. A RowIndex counts the ranks whose query blocks it has. On the index's device.
    """
    device = index.device
    starts = torch.arange(0, layout.seq_len, layout.block)
    owner, tokens = layout.locate(starts)[0].to(device), (layout.seq_len - starts).clamp_max(layout.block).to(device)
    holds = holds.to(device)
    rows = torch.where(owner == holds[:, :1], tokens, 0).double()  # [R, n]: real tokens of a rank in each block
    by_source = rows.new_zeros(len(holds), layout.world)
    by_hop = by_source.index_add_(1, owner, PAIRS_BY_KEY[type(index)](index, rows)).gather(1, holds)
    if index.columns is not None:
        by_hop[:, -1] += rows @ index.columns.seen_by_block().sum((0, 1))[: len(starts)]
    return by_hop


def _by_distance(index: DistanceIndex, rows: torch.Tensor) -> torch.Tensor:
    """float64 [R, n]: pairs of each rank's rows [R, n] with the keys of each block, over all heads, without columns."""
    blocks, diagonal = rows.shape[1], _diagonal(rows, index.hit)
    heads = index.hit[..., :blocks].sum((0, 1)).double()
    heads[0] = 0  # the diagonal
    spectrum = torch.fft.rfft(rows, 2 * blocks) * torch.fft.rfft(heads, 2 * blocks).conj()
    return torch.fft.irfft(spectrum, 2 * blocks)[:, :blocks].round() * index.block + diagonal


def _by_row(index: RowIndex, rows: torch.Tensor) -> torch.Tensor:
    """The same for ranks whose query blocks the index has."""
    blocks = rows.shape[1]
    own = (index.starts.long() // index.block).clamp_max(blocks)  # padding goes to the last place, which has no rows
    rows_of_own = torch.nn.functional.pad(rows, (0, 1))[:, own]
    starts = torch.arange(blocks, device=rows.device) * index.block
    earlier = starts < index.starts[:, None]
    pairs = torch.zeros_like(rows)
    for head in range(index.mask.shape[1]):
        seen = index.heads(slice(head, head + 1)).rows_that_see(rows_of_own.sum(0)).sum((0, 1)).double()
        pairs += (rows_of_own > 0).double() @ (seen[:, starts // index.span] * earlier)
    return pairs * index.block + _diagonal(rows, index.mask)


def _diagonal(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[R, n]: pairs of rows with their own blocks, causally. table [B, N, ..]: every head keeps them."""
    return table.shape[0] * table.shape[1] * rows * (rows + 1) / 2


# type of index -> pairs of each rank's rows with the keys of each block, see _by_distance
PAIRS_BY_KEY = {DistanceIndex: _by_distance, RowIndex: _by_row}


def _member(rank: int, world: int, inner: int | None) -> Ring:
    """A rank's place in a ring, without processes."""
    ranks = tuple(range(world))
    if inner is None:
        return Ring(rank, ranks)
    node, local = divmod(rank, inner)
    around = Circle(local, ranks[node * inner : (node + 1) * inner])
    return Ring(rank, ranks, inner=around, outer=Circle(node, ranks[local::inner]))
