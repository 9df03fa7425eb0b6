"""Device code of column attention: every query block against a list of single keys, gathered beforehand.

A column is seen by all rows of a query block or by none: it must lie in an earlier block, and no kept block may
cover it, which the table hit[distance in blocks] tells. So one bit a column and query block masks a whole tile.

Shapes: q, dout, out [B, Sq, N, D]; gathered k, v [B, N, C, D]; position [B, N, C]; hit [B, N, n]; lse and
delta [B, N, Sq].
"""

import triton
import triton.language as tl

from mtraining_nns.ops.kernels.triton_blocks import (
    LOG2E,
    add_dkv,
    add_dq,
    load_carry,
    load_lse,
    load_rows,
    online_softmax,
    store_rows,
    store_softmax,
)


@triton.jit
def seen_columns(POSITION, HIT, columns, limit, q_start, n, BLOCK: tl.constexpr):
    """int1 [columns]: columns that the query block starting at `q_start` attends to."""
    position = tl.load(POSITION + columns, mask=columns < limit, other=2147483647)
    distance = q_start // BLOCK - position // BLOCK
    inside = (distance > 0) & (distance < n)
    return inside & (tl.load(HIT + tl.where(inside, distance, 0)) == 0)


@triton.jit
def columns_forward(
    Q, K, V, POSITION, HIT, VISIBLE, Q_STARTS, OUT_IN, LSE_IN, OUT, LSE,
    scale, N, Sq, C, nq, n_hit,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    CARRY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = nq * (BLOCK // M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles
    b, n, i = head // N, head % N, tile // (BLOCK // M)
    own = b * Sq * N * D + n * D
    q = load_rows(Q + own, tile * M, N * D, Sq, M, D, True)
    if CARRY:
        m, l, acc = load_carry(OUT_IN + own, LSE_IN + head * Sq, tile * M, N * D, Sq, M, D)
    else:
        m, l, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    q_start = tl.load(Q_STARTS + i)
    visible = tl.load(VISIBLE + head * nq + i)
    for first in range(0, visible, T):
        columns = first + tl.arange(0, T)
        seen = seen_columns(POSITION + head * C, HIT + head * n_hit, columns, visible, q_start, n_hit, BLOCK)
        k = load_rows(K + head * C * D, first, D, C, T, D, True)
        v = load_rows(V + head * C * D, first, D, C, T, D, True)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        scores += tl.where(seen, 0.0, float("-inf"))[None, :]
        m, l, acc = online_softmax(scores, scale * LOG2E, v, m, l, acc, PRECISION)
    store_softmax(OUT + own, LSE + head * Sq, tile * M, N * D, Sq, (m, l, acc), M, D)


@triton.jit
def columns_dq(
    Q, K, V, DOUT, LSE, DELTA, POSITION, HIT, VISIBLE, Q_STARTS, DQ,
    scale, N, Sq, C, nq, n_hit,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = nq * (BLOCK // M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles
    b, n, i = head // N, head % N, tile // (BLOCK // M)
    rows = tile * M + tl.arange(0, M)
    own = b * Sq * N * D + n * D
    q, dout = (
        load_rows(Q + own, tile * M, N * D, Sq, M, D, True),
        load_rows(DOUT + own, tile * M, N * D, Sq, M, D, True),
    )
    lse = load_lse(LSE + head * Sq, rows, Sq)
    delta = tl.load(DELTA + head * Sq + rows, mask=rows < Sq, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    q_start = tl.load(Q_STARTS + i)
    visible = tl.load(VISIBLE + head * nq + i)
    for first in range(0, visible, T):
        columns = first + tl.arange(0, T)
        seen = seen_columns(POSITION + head * C, HIT + head * n_hit, columns, visible, q_start, n_hit, BLOCK)
        k = load_rows(K + head * C * D, first, D, C, T, D, True)
        v = load_rows(V + head * C * D, first, D, C, T, D, True)
        dq = add_dq(q, dout, k, v, lse, delta, seen[None, :], dq, scale, True, PRECISION)
    dq = dq * scale + load_rows(DQ + own, tile * M, N * D, Sq, M, D, True)
    store_rows(DQ + own, tile * M, N * D, Sq, dq, M, D)


@triton.jit
def columns_dkv(
    Q, K, V, DOUT, LSE, DELTA, POSITION, HIT, FIRST, Q_STARTS, DK, DV,
    scale, N, Sq, C, nq, n_hit, heads,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (split, head, tile): a tile of columns against every SPLIT-th query block; dk, dv [SPLIT, B, N, C, D]."""
    tiles = tl.cdiv(C, T)
    split = (tl.program_id(0) // (tiles * heads)).to(tl.int64)
    head = (tl.program_id(0) // tiles % heads).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, n = head // N, head % N
    columns = tile * T + tl.arange(0, T)
    k, v = (
        load_rows(K + head * C * D, tile * T, D, C, T, D, True),
        load_rows(V + head * C * D, tile * T, D, C, T, D, True),
    )
    Q += b * Sq * N * D + n * D
    DOUT += b * Sq * N * D + n * D
    dk, dv = tl.zeros([T, D], tl.float32), tl.zeros([T, D], tl.float32)
    begin = tl.load(FIRST + head * tiles + tile) + split.to(tl.int32)
    steps = tl.maximum(tl.cdiv(nq - begin, SPLIT), 0) * (BLOCK // M)
    for t in range(0, steps):
        i = begin + t // (BLOCK // M) * SPLIT
        row = i * BLOCK + (t % (BLOCK // M)) * M
        rows = row + tl.arange(0, M)
        seen = seen_columns(POSITION + head * C, HIT + head * n_hit, columns, C, tl.load(Q_STARTS + i), n_hit, BLOCK)
        q = load_rows(Q, row, N * D, Sq, M, D, not EVEN)
        dout = load_rows(DOUT, row, N * D, Sq, M, D, not EVEN)
        lse = load_lse(LSE + head * Sq, rows, Sq)
        delta = tl.load(DELTA + head * Sq + rows, mask=rows < Sq, other=0.0)
        dk, dv = add_dkv(q, dout, k, v, lse, delta, seen[:, None], dk, dv, scale, True, PRECISION)
    out = (split * heads + head) * C * D
    store_rows(DK + out, tile * T, D, C, dk * scale, T, D)
    store_rows(DV + out, tile * T, D, C, dv, T, D)
