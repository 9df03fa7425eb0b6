"""Vertical-slash: a few key columns and a few diagonals, estimated online from the last queries.

    A  = softmax(q[-last_q:] k^T * scale + causal)                      over the whole sequence, all ranks
    columns   sum of A over the queries                                  one entry per key
    slashes   sum of A along diagonals, pooled into bins of `block`      bin b: distances [b * block, (b + 1) * block)

Top-p keeps the fewest largest entries whose mass reaches p, the entry that crosses p included; a fixed budget keeps
the k largest, with `head_budgets` each head its own k. A kept bin keeps block diagonals b and b + 1, which together
cover each of its distances. Sinks, the local band and the main diagonal are added after the budgets. Source: MTraining,
algorithm 1.

Columns are chosen from each rank's own best `cap`, which contain the global best `cap`. Bins are summed over the ring
before the budget, since one diagonal crosses all ranks. Ties go to the earlier key and the shorter distance. Nothing
waits for the device. On a GPU the weights are never held: two passes over the keys, `ops/kernels/triton_estimate.py`.
"""

from functools import lru_cache

import torch

from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import NO_COLUMN, ColumnIndex, DistanceIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place
from mtraining_nns.ops.patterns.top_p import descending, within_share

ROW_BITS = False
CHUNK_ELEMENTS = 1 << 25  # scores held at once while estimating in torch


def most_columns(config: AttentionConfig, seq_len: int) -> int:
    """Sinks, and what the budget allows a head."""
    return min(config.sinks + _most_beside_sinks(config), seq_len)


def _most_beside_sinks(config: AttentionConfig) -> int:
    return min(config.cap, config.k_v) if config.budget == "fixed" else config.cap


def build(q, k, place: Place, config: AttentionConfig, scale: float) -> DistanceIndex:
    """q [B, S_local, N, D], k [B, S_local, H, D] -> index of the global sequence."""
    columns, bins = masses(q, k, place, config, scale)
    hit = _slashes(bins, place.layout.seq_len, config)
    position, count, capped = _columns(columns, place, config)
    column_index = ColumnIndex(position=position, count=count, hit=hit, block=config.block)
    return DistanceIndex(hit=hit, block=config.block, columns=column_index, capped=capped)


def budgets(q, k, place: Place, config: AttentionConfig, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [B, N] each: the columns and the bins that `build` takes, be they sinks and in the local band or not.

    A fixed budget of these numbers keeps the same.
    """
    columns, bins = masses(q, k, place, config, scale)
    best, _, kept = _taken_columns(columns, place, config, min(config.cap, place.layout.seq_len))
    _, chosen = _taken_bins(bins[..., : -(-place.layout.seq_len // config.block)], config)
    return (kept & (best >= 0)).sum(-1).clamp_min(1), chosen.sum(-1).clamp_min(1)


def masses(q, k, place: Place, config: AttentionConfig, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention mass of the last queries.

    Returns columns fp32 [B, N, S_local] of this rank's keys (-1 at padding) and bins fp32 [B, N, n] of the ring.
    """
    ring, (lse_over_keys, weights_over_keys) = place.ring, _passes(k)
    queries = last_queries(q, place, config.last_q)
    lse = lse_over_keys(queries, k, place, scale)
    if ring.world > 1:
        lse = torch.logsumexp(torch.stack(ring.gather(lse)), 0)
    columns, bins = weights_over_keys(queries, k, lse, place, scale)
    return columns, ring.sum(bins)


def last_queries(q, place: Place, last_q: int) -> torch.Tensor:
    """[B, L, N, D]: the last real queries, whole on every rank."""
    layout, ring = place
    first = max(0, layout.seq_len - last_q)
    if ring.world == 1:
        return q[:, first : layout.seq_len].contiguous()
    mine, local = _own_rows(layout, ring.rank, first, q.device)
    # one rank gives a row and the others zeros, so that nothing is rounded
    return ring.sum(q[:, local] * mine[:, None, None])


@lru_cache(maxsize=64)
def _own_rows(layout: Layout, rank: int, first: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool, int64) of the tokens from `first` on: whether the rank holds them, and where; 0 where it does not."""
    owner, local = layout.locate(torch.arange(first, layout.seq_len))
    return (owner == rank).to(device), torch.where(owner == rank, local, 0).to(device)


def _passes(k):
    """(local_lse, pooled_weights): kernels on a GPU, plain torch elsewhere and for head dims that no kernel does."""
    if k.is_cuda:
        from mtraining_nns.ops.kernels import triton_estimate

        if k.shape[3] in triton_estimate.HEAD_DIMS:
            return triton_estimate.local_lse, triton_estimate.pooled_weights
    return local_lse, pooled_weights


def local_lse(queries, k, place: Place, scale: float) -> torch.Tensor:
    """fp32 [B, N, L]: log-sum-exp of the causal scores over this rank's keys, -inf where none is seen."""
    return torch.cat([torch.logsumexp(scores, -1) for _, scores in _scores(queries, k, place, scale)], 1)


def pooled_weights(queries, k, lse, place: Place, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the weights exp(score - lse): columns fp32 [B, N, S_local], -1 at padding, 0 for NaN, and bins
    fp32 [B, N, n].

    lse: fp32 [B, N, L] over the whole ring. The bins hold what this rank's keys add.
    """
    layout, ring = place
    columns = torch.empty(k.shape[0], queries.shape[2], k.shape[1], dtype=torch.float32, device=k.device)
    bins = columns.new_zeros(*columns.shape[:2], layout.global_blocks + 1)
    rows = range(layout.seq_len - queries.shape[1], layout.seq_len)
    pooling = _Pooling(rows, layout.block_starts(ring.rank, k.device), layout.block)
    for heads, scores in _scores(queries, k, place, scale):
        weights = torch.exp(scores - lse[:, heads, :, None])
        columns[:, heads] = weights.sum(2).nan_to_num_(nan=0.0)  # NaN comes of a run that has diverged
        pooling.add(weights, bins[:, heads])
    columns.masked_fill_(_positions(k, place) >= layout.seq_len, -1.0)
    return columns, bins[..., :-1].contiguous()


def _positions(k, place: Place) -> torch.Tensor:
    """int64 [S_local]: global positions of this rank's keys."""
    return place.layout.positions(place.ring.rank, k.device)[: k.shape[1]]


def _scores(queries, k, place: Place, scale: float):
    """Yield (heads, fp32 [B, heads, L, S_local]): causal scores of a few query heads of one kv group at a time."""
    batch, last, heads, _ = queries.shape
    group = heads // k.shape[2]
    fits = max(1, CHUNK_ELEMENTS // (batch * last * k.shape[1]))
    step = max(n for n in range(1, group + 1) if group % n == 0 and n <= fits)
    rows = torch.arange(place.layout.seq_len - last, place.layout.seq_len, device=k.device)
    later = _positions(k, place) > rows[:, None]
    for head in range(k.shape[2]):
        kv = k[:, :, head].float().transpose(1, 2)[:, None]
        for first in range(head * group, (head + 1) * group, step):
            heads = slice(first, first + step)
            scores = queries[:, :, heads].float().transpose(1, 2) @ kv
            yield heads, scores.mul_(scale).masked_fill_(later, -torch.inf)


class _Pooling:
    """Sums attention weights along diagonals into bins of `block` distances.

    Query p = i * block + o and key c = j * block + b have distance (i - j) * block + o - b: bin i - j where b <= o, bin
    i - j - 1 elsewhere. So each key block of a query splits into two bins, and queries of one block i share them.
    """

    def __init__(self, rows: range, starts: torch.Tensor, block: int):
        self.block, self.blocks = block, starts.long() // block
        self.runs = {}  # query block -> its part of the last queries
        for query_block in range(rows.start // block, (rows.stop - 1) // block + 1):
            first, last = max(rows.start, query_block * block), min(rows.stop, (query_block + 1) * block)
            self.runs[query_block] = slice(first - rows.start, last - rows.start)
        offsets = torch.arange(rows.start, rows.stop, device=starts.device) % block
        self.near = (torch.arange(block, device=starts.device) <= offsets[:, None]).float()

    def add(self, weights: torch.Tensor, bins: torch.Tensor) -> None:
        """Add weights [B, h, L, S_local] into bins [B, h, n + 1]; the last bin collects nothing."""
        weights = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % self.block)).unflatten(-1, (-1, self.block))
        low, total = torch.einsum("bhqjt,qt->bhqj", weights, self.near), weights.sum(-1)
        blocks, last = self.blocks[: low.shape[-1]], bins.shape[-1] - 1
        for block, run in self.runs.items():
            distance = block - blocks
            # a key block later than the query holds no weight; every target bin occurs once, so the sum has one order
            bins.index_add_(-1, torch.where(distance >= 0, distance, last), low[:, :, run].sum(2))
            high = (total - low)[:, :, run].sum(2)
            bins.index_add_(-1, torch.where(distance >= 1, distance - 1, last), high)


def _slashes(bins, seq_len: int, config: AttentionConfig):
    """bool [B, N, n]: kept block diagonals."""
    num_bins, near = -(-seq_len // config.block), -(-config.local // config.block)  # padding adds blocks, not bins
    if bins.is_cuda and not config.head_budgets:
        from mtraining_nns.ops.kernels import triton_budgets

        budget = config.k_s if config.budget == "fixed" else None
        kept = triton_budgets.slashes(bins.contiguous(), used=num_bins, share=config.p_s, budget=budget, near=near)
    else:
        order, chosen = _taken_bins(bins[..., :num_bins], config)
        kept = (torch.arange(bins.shape[-1], device=bins.device) < near).expand(bins.shape).clone()
        kept[..., :num_bins] |= torch.zeros_like(chosen).scatter_(-1, order, chosen)
    hit = diagonals(kept)
    hit[..., 0] = True
    return hit


def _taken_bins(bins, config: AttentionConfig):
    """(order, bool in that order): bins by mass, and which of them are within the budget."""
    order, mass = descending(bins)
    total = mass.sum(-1, keepdim=True)
    return order, _within_budget(mass, total, config.p_s, _budget(config, 1, bins.device), config)


def diagonals(bins) -> torch.Tensor:
    """bool [.., n]: the block diagonals that kept bins [.., n] keep, b and b + 1 for bin b."""
    hit = bins.clone()
    hit[..., 1:] |= bins[..., :-1]
    return hit


def _columns(mass, place: Place, config: AttentionConfig):
    """(position int32 [B, N, C], count int32 [B, N], capped int32): the kept columns of the ring and the sinks."""
    layout, ring = place
    cap, sinks = min(config.cap, layout.seq_len), min(config.sinks, layout.seq_len)
    if mass.is_cuda and not config.head_budgets:
        return _columns_by_kernels(mass, place, config, cap, sinks)
    best, position, kept = _taken_columns(mass, place, config, cap)
    capped = _short_of_budget(best, layout.seq_len, config)
    position = torch.where(kept & (best >= 0) & (position >= sinks), position, NO_COLUMN)
    leading = torch.arange(sinks, dtype=torch.int32, device=mass.device).expand(*mass.shape[:2], -1)
    position = (
        torch.cat([leading, position], -1).sort(-1).values[..., : most_columns(config, layout.seq_len)].contiguous()
    )
    return position, (position != NO_COLUMN).sum(-1, dtype=torch.int32), capped


def _taken_columns(mass, place: Place, config: AttentionConfig, cap: int):
    """(mass, position, bool) of the ring's best `cap` columns, descending: which of them are within the budget."""
    best, position = _unranked(_best_of_the_ring(mass, place, cap))
    total = torch.full_like(best[..., :1], _total(place.layout.seq_len, config))
    return best, position, _within_budget(best, total, config.p_v, _budget(config, 0, mass.device), config)


def _total(seq_len: int, config: AttentionConfig) -> int:
    """Mass of all columns: the weights of a query sum to one, so the number of queries."""
    return min(config.last_q, seq_len)


def _columns_by_kernels(mass, place: Place, config: AttentionConfig, cap: int, sinks: int):
    """The same without a sort: only the crossing mass is searched for, and masses are walked in order of position."""
    from mtraining_nns.ops.kernels import triton_budgets

    position = None
    if place.ring.world > 1:
        best, position = _unranked(_best_of_the_ring(mass, place, cap))
        position, order = position.sort(-1)
        mass = best = best.gather(-1, order)
    elif mass.shape[-1] > cap:
        best = mass.topk(cap, sorted=False).values
    else:
        best = mass
    fixed, total = config.budget == "fixed", _total(place.layout.seq_len, config)
    position, count, short = triton_budgets.columns(
        mass,
        best,
        position,
        wanted=float("inf") if fixed or config.p_v == 1.0 else config.p_v * total,
        most=min(cap, _most_beside_sinks(config)),
        sinks=sinks,
        width=most_columns(config, place.layout.seq_len),
    )
    capped = _short_of_wish(count, place.layout.seq_len, config)
    return position, count, short.sum(dtype=torch.int32) if capped is None else capped


def _best_of_the_ring(mass, place: Place, cap: int):
    """Ranks (see `_ranked`) of the largest `cap` masses of all ranks, descending; each rank's own best contain them."""
    layout, ring = place
    ranked = _largest(_ranked(mass, layout.positions(ring.rank, mass.device)[: mass.shape[-1]]), cap)
    return _largest(torch.cat(ring.gather(ranked), -1), cap) if ring.world > 1 else ranked


def _ranked(mass, position):
    """int64 whose order is: larger mass first, then earlier position; negative masses (padding) come last.

    The bits of non-negative floats are ordered like the floats.
    """
    return (mass.view(torch.int32).long() << 32) | (0xFFFFFFFF - position)


def _unranked(ranked):
    """(mass fp32, position int32)."""
    return (ranked >> 32).to(torch.int32).view(torch.float32), (0xFFFFFFFF - (ranked & 0xFFFFFFFF)).to(torch.int32)


def _largest(ranked, count: int):
    return ranked.topk(min(count, ranked.shape[-1]), sorted=True).values


@lru_cache(maxsize=256)
def _budget(config: AttentionConfig, which: int, device: torch.device) -> int | torch.Tensor:
    """How many columns (0) or bins (1) a fixed budget keeps: of all heads, or int64 [N, 1] of the only layer."""
    if not config.head_budgets:
        return (config.k_v, config.k_s)[which]
    (heads,) = config.head_budgets
    return torch.tensor([pair[which] for pair in heads], device=device)[:, None]


def _within_budget(mass, total, share: float, budget, config: AttentionConfig):
    """bool like mass [B, N, K] (descending): the entries kept; budget: a number, or one a head [N, 1]."""
    rank = torch.arange(mass.shape[-1], device=mass.device)
    if config.budget == "fixed":
        return (rank < budget).expand(mass.shape)
    return within_share(mass, total, share)


def _short_of_budget(best, seq_len: int, config: AttentionConfig):
    """int32 scalar: heads that wanted more columns than the cap allows. best: masses of the columns within the cap."""
    certain = _short_of_wish(best, seq_len, config)
    if certain is not None:
        return certain
    return (best.clamp_min(0).sum(-1, keepdim=True) < config.p_v * _total(seq_len, config)).sum(dtype=torch.int32)


def _short_of_wish(heads, seq_len: int, config: AttentionConfig):
    """The same where the wish is a number of columns, else None. heads: any tensor [B, N, ..]."""
    if config.budget != "fixed" and config.p_v < 1.0:
        return None
    wanted = config.k_v if config.budget == "fixed" else seq_len
    many = heads.shape[0] * heads.shape[1] * (min(wanted, seq_len) > config.cap)
    return torch.full((), many, dtype=torch.int32)
