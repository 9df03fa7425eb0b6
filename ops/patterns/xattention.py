"""XAttention: the key blocks of each query block that carry its attention mass, estimated from antidiagonals.

Tokens are cut into groups of `stride`. The antidiagonal of the square of a query and a key group, which crosses each of
its rows and columns once, stands for the whole square:

    logit(a, b) = sum over t < stride of q[a * stride + stride - 1 - t] . k[b * stride + t] * scale / stride
    weight(a, .) = softmax of logit(a, b) over b <= a
    score(i, j) = sum of weight(a, b) over the groups a of query block i and b of key block j

A query block keeps the fewest blocks, best first, whose scores reach `threshold` of its total, the one that crosses
included, ties to the earlier block; and always the diagonal. Threshold 1 keeps every block. A group's antidiagonal with
itself holds a few later keys: they help to choose blocks, but no query attends to them.

Padded tokens count as zeros, and query groups of padding alone as nothing. So neither what padding holds nor how much
of it a ring needs changes a score.

Keys travel around the ring once for some heads at a time, and each rank scores its own queries. What is held: sums
fp32 [heads, own groups, global blocks], and logits of CHUNK_ELEMENTS pairs of groups. A baseline: the estimate takes
1 / stride of the products of dense q k^T, so it grows with the square of the length. Source: XAttention: Block Sparse
Attention with Antidiagonal Scoring.
"""

from dataclasses import replace

import torch

from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.hops import Journey
from mtraining_nns.ops.index import RowIndex
from mtraining_nns.ops.patterns import Place
from mtraining_nns.ops.patterns.top_p import fewest

ROW_BITS = False
SUMS_BYTES = 1 << 30  # sums of the heads that are estimated at once, at least one key head's
CHUNK_ELEMENTS = 1 << 25  # logits held at once


def most_columns(config: AttentionConfig, seq_len: int) -> int:
    """None: whole blocks alone."""
    return 0


def build(q, k, place: Place, config: AttentionConfig, scale: float) -> RowIndex:
    """q [B, S_local, N, D], k [B, S_local, H, D] -> index of this rank's query blocks."""
    layout, ring = place
    batch, kv_heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    q, k = _without_padding(q, place), _without_padding(k, place)
    sums = 4 * batch * group * (layout.local_len // config.stride) * layout.global_blocks
    step = max(1, min(kv_heads, SUMS_BYTES // sums))
    kept = []
    for first in range(0, kv_heads, step):
        last = min(first + step, kv_heads)
        scores = block_scores(
            q[:, :, first * group : last * group], k[:, :, first:last], place, stride=config.stride, scale=scale
        )
        kept.append(fewest(scores, config.threshold))
    starts = layout.block_starts(ring.rank, q.device)
    return RowIndex(mask=torch.cat(kept, 1), starts=starts, block=config.block, span=config.block)


def block_scores(q, k, place: Place, *, stride: int, scale: float) -> torch.Tensor:
    """fp32 [B, N, nq, n]: estimated mass of each own query block on each global key block. q, k without padding."""
    estimate = _Estimate(q, k.shape[2], place, stride, scale)
    ring = replace(place.ring, mode="ring")  # the keys of one rank a hop
    # one tensor travels, as the two halves that a journey takes
    for hop in Journey(ring, *(x.contiguous() for x in k.chunk(2, 1)), name="keys"):
        estimate.add(torch.cat(hop.arrive()[:2], 1), *hop.sources)
    return estimate.scores()


def _without_padding(x, place: Place):
    """[B, local_len, H, D]: this rank's tokens, zero from the end of the sequence on."""
    layout, ring = place
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, layout.local_len - x.shape[1]))
    real = layout.positions(ring.rank, x.device) < layout.seq_len
    return torch.where(real[:, None, None], x, 0)


class _Estimate:
    """Weights of this rank's query groups summed over key blocks, hop by hop, each hop relative to its own maximum.

    Shapes: B batch, H key heads of G query heads each, A own groups, g groups a block; nq own and n global blocks.
    """

    def __init__(self, q, kv_heads: int, place: Place, stride: int, scale: float):
        self.layout, self.ring = place
        self.stride, self.factor, self.kv_heads = stride, scale / stride, kv_heads
        self.per_block = self.layout.block // stride
        groups = q.unflatten(1, (-1, stride)).flip(2).unflatten(3, (kv_heads, -1))  # [B, A, stride, H, G, D]
        self.queries = groups.permute(0, 3, 4, 1, 2, 5).flatten(4).flatten(0, 1)  # [B * H, G, A, stride * D]
        self.own = self._groups(self.ring.rank)
        self.hops: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # source, maxima [B * H, G, A], sums [.., blocks]

    def add(self, k, source: int) -> None:
        """The keys [B, S, H, D] of a rank."""
        keys = k.unflatten(1, (-1, self.stride)).permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
        places = self._groups(source)
        top = torch.full(self.queries.shape[:3], -torch.inf, dtype=torch.float32, device=k.device)
        sums = top.new_zeros(*top.shape, self.layout.local_blocks)
        for rows, blocks in self._tiles(source):
            cols = slice(0, blocks * self.per_block)
            logits = self._logits(self.queries[:, :, rows], keys[:, cols])
            logits.masked_fill_(places[cols] > self.own[rows, None], -torch.inf)
            highest = logits.amax(-1)
            logits.sub_(highest.nan_to_num(neginf=0.0)[..., None]).exp_()
            top[:, :, rows], sums[:, :, rows, :blocks] = highest, logits.unflatten(-1, (blocks, -1)).sum(-1)
        self.hops.append((source, top, sums))

    def scores(self) -> torch.Tensor:
        """fp32 [B, N, nq, n]."""
        highest = torch.stack([top for _, top, _ in self.hops]).amax(0)  # finite: a group sees itself
        shares = [torch.exp(top - highest) for _, top, _ in self.hops]
        total = sum(share * sums.sum(-1) for share, (_, _, sums) in zip(shares, self.hops, strict=True))
        real = self.own * self.stride < self.layout.seq_len
        scores = total.new_zeros(*total.shape[:2], self.layout.local_blocks, self.layout.global_blocks)
        for share, (source, _, sums) in zip(shares, self.hops, strict=True):
            weight = (share / total * real).unflatten(2, (-1, self.per_block))
            pooled = torch.einsum("hgia,hgiaj->hgij", weight, sums.unflatten(2, (-1, self.per_block)))
            blocks = self.layout.block_starts(source, total.device).long() // self.layout.block
            scores.index_copy_(-1, blocks, pooled)
        return scores.unflatten(0, (-1, self.kv_heads)).flatten(1, 2)

    def _logits(self, queries, keys):
        """fp32 [B * H, G, rows, cols]; 16-bit inputs are multiplied as they are and added in fp32."""
        rows, columns = queries.flatten(1, 2), keys.transpose(1, 2)
        if rows.is_cuda and rows.element_size() == 2:
            logits = torch.bmm(rows, columns, out_dtype=torch.float32)
        else:
            logits = torch.bmm(rows.float(), columns.float())
        return logits.mul_(self.factor).unflatten(1, (queries.shape[1], -1))

    def _groups(self, rank: int):
        """int32 [A]: numbers of a rank's groups in the sequence."""
        device = self.queries.device
        starts = self.layout.block_starts(rank, device) // self.stride
        return (starts[:, None] + torch.arange(self.per_block, dtype=torch.int32, device=device)).flatten()

    def _tiles(self, source: int):
        """Yield (own groups, how many of the source's blocks the last of them sees); the layout tells, on the host."""
        rows, cols = self.layout.block_starts(self.ring.rank), self.layout.block_starts(source)
        heads = self.queries.shape[0] * self.queries.shape[1]
        step = max(1, CHUNK_ELEMENTS // (heads * self.per_block * len(cols) * self.per_block))
        for first in range(0, len(rows), step):
            last = min(first + step, len(rows))
            blocks = int(torch.searchsorted(cols, rows[last - 1], right=True))
            if blocks:
                yield slice(first * self.per_block, last * self.per_block), blocks
