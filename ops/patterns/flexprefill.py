"""FlexPrefill: each head keeps the key blocks that carry a share of its mass, by query or as columns and slashes.

    looked   column mass of the last `block` queries, pooled over key blocks: what they really attend to
    guessed  softmax over key blocks of (mean of those queries) . (mean of the block's keys) * scale
    a head whose two distributions are less than `tau` apart, by the root of their Jensen-Shannon divergence, trusts the
    guess for all of its queries:

    by query    weight(i, j) = softmax over j <= i of (mean of query block i) . (mean of key block j) * scale; of the
                whole map the fewest entries that reach `threshold` of its sum
    otherwise   of the looked columns, by block, and of the slash bins (`vertical_slash.py`) the fewest each that reach
                `threshold` of the mass; a bin keeps block diagonals b and b + 1

The blocks of the sinks, the local band and the diagonal are always kept. Ties go to the earlier entry. Columns are
whole blocks, since a row pattern knows nothing smaller. A baseline for evaluation: on a ring every rank gets means of
all blocks and chooses for all query blocks, in fp32 [heads, n, n] for MAP_ELEMENTS pairs of blocks at a time.
Source: FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence Inference.
"""

from dataclasses import replace

import torch

from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import RowIndex
from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.patterns.top_p import fewest

ROW_BITS = False
MAP_ELEMENTS = 1 << 27


def most_columns(config: AttentionConfig, seq_len: int) -> int:
    """None: whole blocks alone."""
    return 0


def build(q, k, place: Place, config: AttentionConfig, scale: float) -> RowIndex:
    """q [B, S_local, N, D], k [B, S_local, H, D] -> index of this rank's query blocks."""
    layout, ring = place
    blocks = -(-layout.seq_len // config.block)
    starts = layout.block_starts(ring.rank, q.device)
    rows = (starts.long() // config.block).clamp_max(blocks - 1)  # a block of padding alone keeps anything
    queries, keys = (block_means(x, place)[:, :blocks] for x in (q, k))
    looked, bins = _looked(q, k, place, config, scale)
    by_query = _distance(looked, _guessed(q, keys, place, config, scale)) < config.tau
    step = max(1, MAP_ELEMENTS // (q.shape[0] * blocks * blocks * (q.shape[2] // k.shape[2])))
    parts = []
    for first in range(0, k.shape[2], step):
        heads = slice(first, first + step)
        parts.append(_by_query(queries, keys, heads, config.threshold, scale)[:, :, rows])
    mask = torch.where(by_query[..., None, None], torch.cat(parts, 1), _stripes(looked, bins, rows, config))
    mask |= _always(rows, blocks, config)
    mask = torch.nn.functional.pad(mask, (0, layout.global_blocks - blocks))
    return RowIndex(mask=mask, starts=starts, block=config.block, span=config.block)


def block_means(x, place: Place) -> torch.Tensor:
    """fp32 [B, n, H, D]: mean of the real tokens of each global block, 0 where there are none."""
    layout, ring = place
    real = layout.positions(ring.rank, x.device)[: x.shape[1]] < layout.seq_len
    x = torch.where(real[:, None, None], x, 0)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, layout.local_len - x.shape[1]))
    sums = x.unflatten(1, (-1, layout.block)).sum(2, dtype=torch.float32)
    whole = sums.new_zeros(x.shape[0], layout.global_blocks, *x.shape[2:])
    # a block is of one rank, so the sum over ranks rounds nothing
    whole = ring.sum(whole.index_copy_(1, layout.block_starts(ring.rank, x.device).long() // layout.block, sums))
    starts = torch.arange(0, layout.padded_len, layout.block, device=x.device)
    return whole / (layout.seq_len - starts).clamp(1, layout.block)[:, None, None]


def _looked(q, k, place: Place, config: AttentionConfig, scale: float):
    """Shares fp32 [B, N, blocks] of key blocks, and bins fp32 [B, N, blocks], of the last `block` queries."""
    layout, ring = place
    columns, bins = vertical_slash.masses(q, k, place, replace(config, last_q=config.block), scale)
    columns = torch.nn.functional.pad(columns.clamp_min(0), (0, layout.local_len - columns.shape[-1]))
    whole = columns.new_zeros(*columns.shape[:2], layout.global_blocks)
    mine = layout.block_starts(ring.rank, q.device).long() // layout.block
    whole = ring.sum(whole.index_copy_(-1, mine, columns.unflatten(-1, (-1, layout.block)).sum(-1)))
    blocks = -(-layout.seq_len // config.block)
    return whole[..., :blocks] / min(config.block, layout.seq_len), bins[..., :blocks]


def _guessed(q, keys, place: Place, config: AttentionConfig, scale: float) -> torch.Tensor:
    """fp32 [B, N, blocks]: shares of key blocks by the means alone."""
    last = vertical_slash.last_queries(q, place, config.block).float().mean(1)  # [B, N, D]
    groups = last.unflatten(1, (keys.shape[2], -1))
    return torch.softmax(torch.einsum("bhgd,bjhd->bhgj", groups, keys).flatten(1, 2) * scale, -1)


def _distance(a, b) -> torch.Tensor:
    """fp32 [B, N]: root of the Jensen-Shannon divergence, in nats, of distributions along the last dim."""
    middle = (a + b) / 2
    divergence = sum((x * (x / middle).log()).nan_to_num(nan=0.0).sum(-1) for x in (a, b)) / 2
    return divergence.clamp_min(0).sqrt()


def _by_query(queries, keys, heads: slice, threshold: float, scale: float) -> torch.Tensor:
    """bool [B, N', blocks, blocks] of the query heads of some key heads."""
    groups = queries.unflatten(2, (keys.shape[2], -1))[:, :, heads]
    weights = torch.einsum("bihgd,bjhd->bhgij", groups, keys[:, :, heads]).flatten(1, 2) * scale
    later = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).triu(1)
    weights = torch.softmax(weights.masked_fill_(later, -torch.inf), -1)
    return fewest(weights.flatten(-2), threshold).view(weights.shape) & ~later


def _stripes(looked, bins, rows, config: AttentionConfig) -> torch.Tensor:
    """bool [B, N, rows, blocks]: block columns and block diagonals."""
    hit = vertical_slash.diagonals(fewest(bins, config.threshold))
    distance = rows[:, None] - torch.arange(bins.shape[-1], device=bins.device)
    return (hit[..., distance.clamp_min(0)] | fewest(looked, config.threshold)[..., None, :]) & (distance >= 0)


def _always(rows, blocks: int, config: AttentionConfig) -> torch.Tensor:
    """bool [rows, blocks]: sinks, local band, diagonal."""
    columns = torch.arange(blocks, device=rows.device)
    distance, local = rows[:, None] - columns, -(-config.local // config.block)
    sinks = columns < -(-config.sinks // config.block)
    return (distance >= 0) & ((distance <= local) | sinks)
