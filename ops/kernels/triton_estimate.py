"""The estimate's two passes over the keys by kernels: attention of the last queries, without a matrix of weights.

    local_lse        a program a tile of keys: the queries' log-sum-exp over the tile, then over all tiles of the rank
    pooled_weights   the same walk again with the whole ring's log-sum-exp: sums of the weights by key and by distance

A program loads its keys once and walks all query heads of their group. Nothing is added atomically: a tile's part of
a bin has a place of its own, and the parts are summed in one order. `ops/patterns/vertical_slash.py` has the same two
functions in plain torch. On CPU tensors these run only under TRITON_INTERPRET=1, for tests.

The second pass takes the queries in steps that lie inside one query block:

    block 128, 64 queries from 131008 on: one step
    block 128, 64 queries from 130990 on: two steps, from 130944 and from 131008 on, partly filled

Shapes: queries [B, L, N, D], the last L of the sequence; k [B, S, H, D], S local; lse [B, N, L]; parts of the bins
[parts, 2, B, N, n]. M queries a step, T keys a tile. Programs are counted in 32 bits, offsets into tensors in 64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.index import NO_COLUMN
from mtraining_nns.ops.kernels.triton_blocks import LN2, LOG2E, load_rows
from mtraining_nns.ops.patterns import Place

HEAD_DIMS = (16, 32, 64, 128, 256)
JOINED = (128, 16)  # tiles and queries that a program of join_tiles looks at together
NOWHERE = tl.constexpr(NO_COLUMN)


class Tiles(NamedTuple):
    """Queries of a step, keys of a program, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# by the size of a number and the head dim: fp32 inputs, 16 bits up to 128, 16 bits of 256
EXACT, FAST, WIDE = Tiles(32, 32, 4, 1), Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 2)


def local_lse(queries, k, place: Place, scale: float) -> torch.Tensor:
    """fp32 [B, N, L]: log-sum-exp of the causal scores over this rank's keys, -inf where none is seen."""
    tiles, k = _tiles(queries, place), k.contiguous()
    (batch, last, heads, _), parts = queries.shape, triton.cdiv(k.shape[1], tiles.keys)
    partial = torch.empty(batch, heads, parts, last, dtype=torch.float32, device=k.device)
    tile_lse[(batch * k.shape[2] * parts,)](
        queries, k, *_positions(place, k), partial, *_sizes(queries, k, scale), **_settings(tiles, queries, place)
    )
    lse, (chunk, rows) = torch.empty(batch, heads, last, dtype=torch.float32, device=k.device), JOINED
    join_tiles[(batch * heads * triton.cdiv(last, rows),)](partial, lse, parts, last, CHUNK=chunk, ROWS=rows)
    return lse


def pooled_weights(queries, k, lse, place: Place, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the weights exp(score - lse): columns fp32 [B, N, S], -1 at padding, 0 for NaN, and bins fp32 [B, N, n].

    lse: fp32 [B, N, L] over the whole ring. The bins hold what this rank's keys add.
    """
    tiles, k, layout = _tiles(queries, place), k.contiguous(), place.layout
    batch, last, heads, _ = queries.shape
    steps = triton.cdiv(layout.seq_len, tiles.queries) - (layout.seq_len - last) // tiles.queries
    parts = steps * max(1, layout.block // tiles.keys)
    columns = torch.empty(batch, heads, k.shape[1], dtype=torch.float32, device=k.device)
    bins = columns.new_zeros(parts, 2, batch, heads, layout.global_blocks)
    tile_weights[(batch * k.shape[2] * triton.cdiv(k.shape[1], tiles.keys),)](
        queries, k, lse.contiguous(), *_positions(place, k), columns, bins, *_sizes(queries, k, scale),
        batch * heads, layout.global_blocks, **_settings(tiles, queries, place),
    )  # fmt: skip
    return columns, bins.sum((0, 1))


def _tiles(queries, place: Place) -> Tiles:
    """Steps lie inside a query block, so that a step's queries and a block's keys share two bins."""
    tiles = EXACT if queries.element_size() > 2 else WIDE if queries.shape[3] > 128 else FAST
    fitting = max(16, triton.next_power_of_2(queries.shape[1]))
    return tiles._replace(queries=min(tiles.queries, place.layout.block, fitting))


def _positions(place: Place, k):
    """Where the local blocks start in the sequence, and where the sequence ends."""
    return place.layout.block_starts(place.ring.rank, k.device), place.layout.seq_len


def _sizes(queries, k, scale: float):
    return scale, queries.shape[1], queries.shape[2], k.shape[2], k.shape[1]


def _settings(tiles: Tiles, queries, place: Place) -> dict:
    return {
        "BLOCK": place.layout.block,
        "M": tiles.queries,
        "T": tiles.keys,
        "D": queries.shape[3],
        "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit
def load_keys(K, STARTS, kv_head, tile, H, S, BLOCK: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """(tile [T, D] of a kv head, global positions [T]); keys past S are zero and later than any query."""
    k = load_rows(K + kv_head // H * S * H * D + kv_head % H * D, tile * T, H * D, S, T, D, True)
    keys = tile * T + tl.arange(0, T)
    position = tl.load(STARTS + keys // BLOCK, mask=keys < S, other=0) + keys % BLOCK
    return k, tl.where(keys < S, position, NOWHERE)


@triton.jit
def load_queries(Q, head, rows, L, N, D: tl.constexpr):
    """Tile [M, D] of the queries numbered `rows`; those outside 0 .. L are zero."""
    Q += head // N * L * N * D + head % N * D
    pointers = Q + (rows[:, None] * (N * D) + tl.arange(0, D)[None, :])
    return tl.load(pointers, mask=((rows >= 0) & (rows < L))[:, None], other=0.0)


@triton.jit
def tile_lse(
    Q, K, STARTS, seq_len, PARTIAL, scale, L, N, H, S,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (kv head, tile of keys): log-sum-exp in base 2 over the tile, [B, N, tiles, L]."""
    tiles, steps, group = tl.cdiv(S, T), tl.cdiv(L, M), N // H
    kv_head = (tl.program_id(0) // tiles).to(tl.int64)  # b * H + h
    tile = tl.program_id(0) % tiles
    k, position = load_keys(K, STARTS, kv_head, tile, H, S, BLOCK, T, D)
    for step in range(0, group * steps):
        head = kv_head * group + step // steps  # b * N + n
        rows = step % steps * M + tl.arange(0, M)
        q = load_queries(Q, head, rows, L, N, D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        seen = position[None, :] <= (seq_len - L + rows)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        # the factor is positive, so it can follow the maximum and join the subtraction in one instruction
        top = tl.max(scores, 1) * (scale * LOG2E)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.math.exp2(scores * (scale * LOG2E) - top[:, None]), 1)
        tl.store(PARTIAL + (head * tiles + tile) * L + rows, top + log2_or_inf(total), mask=rows < L)


@triton.jit
def log2_or_inf(total):
    """-inf where nothing was summed."""
    return tl.where(total == 0.0, float("-inf"), tl.math.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def join_tiles(PARTIAL, LSE, tiles, L, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Program (head, some queries): from base 2 over each tile to the natural log-sum-exp over all."""
    head = (tl.program_id(0) // tl.cdiv(L, ROWS)).to(tl.int64)
    rows = tl.program_id(0) % tl.cdiv(L, ROWS) * ROWS + tl.arange(0, ROWS)
    PARTIAL += head * tiles * L
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        exists = (tile < tiles)[:, None] & (rows < L)[None, :]
        lse = tl.load(PARTIAL + tile[:, None] * L + rows[None, :], mask=exists, other=float("-inf"))
        higher = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # queries that saw nothing yet
        total = total * tl.math.exp2(top - safe) + tl.sum(tl.math.exp2(lse - safe[None, :]), 0)
        top = higher
    tl.store(LSE + head * L + rows, (top + log2_or_inf(total)) * LN2, mask=rows < L)


@triton.jit
def tile_weights(
    Q, K, LSE, STARTS, seq_len, COLUMNS, BINS, scale, L, N, H, S, heads, n,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (kv head, tile of keys): the tile's columns and its part of the bins.

    Query i * BLOCK + o and key j * BLOCK + b are i - j bins apart where b <= o and i - j - 1 elsewhere. So a step and a
    key block add to two bins, at a place [step, tile of the block, near or far, B, N, bin] that is theirs alone.
    """
    tiles, group, first = tl.cdiv(S, T), N // H, seq_len - L
    KEY_BLOCKS: tl.constexpr = T // BLOCK if T > BLOCK else 1  # of a tile
    BLOCK_TILES: tl.constexpr = BLOCK // T if BLOCK > T else 1  # of a key block
    kv_head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    k, position = load_keys(K, STARTS, kv_head, tile, H, S, BLOCK, T, D)
    keys = tile * T + tl.arange(0, T)
    blocks = tile * T // BLOCK + tl.arange(0, KEY_BLOCKS)
    starts = tl.load(STARTS + blocks, mask=blocks * BLOCK < S, other=NOWHERE)

    steps = tl.cdiv(seq_len, M) - first // M
    mass = tl.zeros([T], tl.float32)
    for t in range(0, group * steps):
        head, step = kv_head * group + t // steps, t % steps
        begin = (first // M + step) * M
        rows = begin + tl.arange(0, M)  # positions of the queries
        q = load_queries(Q, head, rows - first, L, N, D)
        lse = tl.load(LSE + head * L + rows - first, mask=(rows >= first) & (rows < seq_len), other=float("inf"))
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        weights = tl.math.exp2(scores * (scale * LOG2E) - (lse * LOG2E)[None, :])
        weights = tl.where(position[:, None] <= rows[None, :], weights, 0.0)
        near = (keys % BLOCK)[:, None] <= (rows % BLOCK)[None, :]
        total, low = tl.sum(weights, 1), tl.sum(tl.where(near, weights, 0.0), 1)
        mass = tl.where(step == 0, 0.0, mass) + total
        if step == steps - 1:
            mass = tl.where(mass == mass, mass, 0.0)  # NaN comes of a run that has diverged
            tl.store(COLUMNS + head * S + keys, tl.where(position < seq_len, mass, -1.0), mask=keys < S)

        distance = begin // BLOCK - starts // BLOCK
        part = step * BLOCK_TILES + tile % BLOCK_TILES
        bins = BINS + (part * 2 * heads + head) * n + distance
        high = tl.sum(tl.reshape(total - low, [KEY_BLOCKS, T // KEY_BLOCKS]), 1)
        low = tl.sum(tl.reshape(low, [KEY_BLOCKS, T // KEY_BLOCKS]), 1)
        tl.store(bins, low, mask=distance >= 0)
        tl.store(bins + tl.cast(heads, tl.int64) * n - 1, high, mask=distance >= 1)
