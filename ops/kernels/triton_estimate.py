"""Device code of the vertical-slash estimate: attention of the last queries to all keys, never held as a whole.

    lse       first pass: log-sum-exp of each query over this rank's keys, in parts of PART key tiles
    masses    second pass: weights exp(score - lse), summed over the queries for each key, and for each key block
              split into the two bins of distances that it falls into

A run is the part of the last queries that lies in one query block; its sums of a key block go to the same two bins.
One program owns some keys of a query head, so nothing is added atomically. Heads of a group stand side by side, so that
their key head is read from memory once.

Shapes: queries [B, L, N, D]; k [B, S, H, D]; lse [B, N, L]; columns [B, N, S]; sums [RUNS, 2, B, N, blocks].
"""

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.kernels.triton_blocks import LOG2E, load_rows

ROWS = 64  # queries at once
PART = 1024  # keys of one program


@triton.jit
def tile_scores(
    q, K, K_STARTS, tile, limit, row_positions, stride, factor,
    BLOCK: tl.constexpr, T: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [ROWS, T] in base 2 of one tile of keys, -inf where the key is later or missing; and the keys' places."""
    first = tile * T
    places = first + tl.arange(0, T)
    k = load_rows(K, first, stride, limit, T, D, True)
    start = tl.load(K_STARTS + first // BLOCK, mask=first < limit, other=0)
    positions = start + places % BLOCK
    scores = tl.dot(q, k.T, input_precision=PRECISION) * factor
    seen = (positions[None, :] <= row_positions[:, None]) & (places < limit)[None, :]
    return tl.where(seen, scores, float("-inf")), places


@triton.jit
def lse_kernel(
    Q, K, K_STARTS, LSE, scale, N, H, S, L, first_row, parts, heads,
    BLOCK: tl.constexpr, T: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    part = tl.program_id(0) // heads % parts
    rows = tl.program_id(0) // (heads * parts) * ROWS + tl.arange(0, ROWS)
    b, n = head // N, head % N
    q = load_rows(Q + b * L * N * D + n * D, tl.program_id(0) // (heads * parts) * ROWS, N * D, L, ROWS, D, True)
    K += b * S * H * D + (n * H // N) * D
    m, l = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for t in range(0, PART // T):
        tile = part * (PART // T) + t
        scores, _ = tile_scores(q, K, K_STARTS, tile, S, first_row + rows, H * D, scale * LOG2E, BLOCK, T, D, PRECISION)
        m_next = tl.maximum(m, tl.max(scores, 1))
        m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        l = l * tl.math.exp2(m - m_safe) + tl.sum(tl.math.exp2(scores - m_safe[:, None]), 1)
        m = m_next
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.math.log2(tl.where(l == 0.0, 1.0, l))) / LOG2E)
    tl.store(LSE + (head * parts + part) * L + rows, lse, mask=rows < L)


@triton.jit
def combine_kernel(PARTS, LSE, L, parts, row_tiles, ROWS: tl.constexpr):
    """Log-sum-exp over the parts."""
    head = (tl.program_id(0) // row_tiles).to(tl.int64)
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    m, l = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for part in range(0, parts):
        x = tl.load(PARTS + (head * parts + part) * L + rows, mask=rows < L, other=float("-inf"))
        m_next = tl.maximum(m, x)
        m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        l = l * tl.exp(m - m_safe) + tl.exp(x - m_safe)
        m = m_next
    lse = tl.where(l == 0.0, float("-inf"), m + tl.log(tl.where(l == 0.0, 1.0, l)))
    tl.store(LSE + head * L + rows, lse, mask=rows < L)


@triton.jit
def masses_kernel(
    Q, K, K_STARTS, LSE, COLUMNS, SUMS, scale, N, H, S, L, first_row, parts, heads, blocks,
    BLOCK: tl.constexpr, T: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    part = tl.program_id(0) // heads
    b, n = head // N, head % N
    K += b * S * H * D + (n * H // N) * D
    for j in range(part * (PART // BLOCK), tl.minimum((part + 1) * (PART // BLOCK), blocks)):
        low, high = tl.zeros([16], tl.float32), tl.zeros([16], tl.float32)  # of up to 16 runs
        for t in range(0, BLOCK // T):
            tile = j * (BLOCK // T) + t
            column = tl.zeros([T], tl.float32)
            for r in range(0, tl.cdiv(L, ROWS)):
                rows = r * ROWS + tl.arange(0, ROWS)
                q = load_rows(Q + b * L * N * D + n * D, r * ROWS, N * D, L, ROWS, D, True)
                lse = tl.load(LSE + head * L + rows, mask=rows < L, other=float("inf")) * LOG2E
                positions = first_row + rows
                scores, places = tile_scores(
                    q, K, K_STARTS, tile, S, positions, H * D, scale * LOG2E, BLOCK, T, D, PRECISION
                )
                weights = tl.math.exp2(scores - lse[:, None])
                column += tl.sum(weights, 0)
                near = (places % BLOCK)[None, :] <= (positions % BLOCK)[:, None]
                near_sum, whole = tl.sum(tl.where(near, weights, 0.0), 1), tl.sum(weights, 1)
                run = positions // BLOCK - first_row // BLOCK
                for i in tl.static_range(RUNS):
                    mine = run == i
                    here = tl.arange(0, 16) == i
                    low += tl.where(here, tl.sum(tl.where(mine, near_sum, 0.0), 0), 0.0)
                    high += tl.where(here, tl.sum(tl.where(mine, whole - near_sum, 0.0), 0), 0.0)
            keys = tile * T + tl.arange(0, T)
            tl.store(COLUMNS + head * S + keys, column, mask=keys < S)
        runs = tl.arange(0, 16)
        out = (runs * 2 * heads + head) * blocks + j
        tl.store(SUMS + out, low, mask=runs < RUNS)
        tl.store(SUMS + out + heads * blocks, high, mask=runs < RUNS)


def local_lse(queries, k, k_starts, block: int, rows: range, scale: float) -> torch.Tensor:
    """fp32 [B, N, L]: log-sum-exp of the last queries, at positions `rows`, over this rank's keys."""
    batch, length, heads = queries.shape[:3]
    part = max(PART, block)
    parts = triton.cdiv(k.shape[1], part)
    found = torch.empty(batch, heads, parts, length, device=k.device)
    lse = torch.empty(batch, heads, length, device=k.device)
    row_tiles = triton.cdiv(length, ROWS)
    lse_kernel[(batch * heads * parts * row_tiles,)](
        queries, k, k_starts, found, *_sizes(queries, k, rows, scale), parts, batch * heads,
        **_flags(queries, block, part),
    )  # fmt: skip
    combine_kernel[(batch * heads * row_tiles,)](found, lse, length, parts, row_tiles, ROWS=ROWS)
    return lse


def local_masses(queries, k, k_starts, block: int, rows: range, scale: float, lse) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns fp32 [B, N, S], sums fp32 [runs, 2, B, N, blocks]) under the ring's `lse`."""
    batch, _, heads = queries.shape[:3]
    part = max(PART, block)
    runs = (rows.stop - 1) // block - rows.start // block + 1
    if runs > 16:
        raise ValueError(f"last_q={len(rows)} spans {runs} blocks of {block}; lower it to at most {15 * block + 1}")
    parts, blocks = triton.cdiv(k.shape[1], part), len(k_starts)
    columns = torch.empty(batch, heads, k.shape[1], device=k.device)
    sums = torch.empty(runs, 2, batch, heads, blocks, device=k.device)
    masses_kernel[(batch * heads * parts,)](
        queries, k, k_starts, lse, columns, sums, *_sizes(queries, k, rows, scale), parts, batch * heads, blocks,
        RUNS=runs, num_warps=8, **_flags(queries, block, part),
    )  # fmt: skip
    return columns, sums


def _sizes(queries, k, rows: range, scale: float):
    return scale, queries.shape[2], k.shape[2], k.shape[1], len(rows), rows.start


def _flags(queries, block: int, part: int) -> dict:
    precision = "ieee" if queries.dtype == torch.float32 else "tf32"
    tile = min(block, 64 if queries.dtype == torch.float32 else 128)
    return {"BLOCK": block, "T": tile, "D": queries.shape[3], "ROWS": ROWS, "PART": part, "PRECISION": precision}
