"""Device code of sparse attention: forward, dQ, and dK with dV. Columns' own dK and dV are in triton_columns.

One program owns a tile of queries (forward, dQ) or of keys (dK, dV) and walks the list of blocks on the other side,
so no result is shared between programs and nothing is added atomically. Listed blocks are seen whole; on a rank's own
step each query block also sees its own key block, causally. A column is seen by all rows of a query block or by none,
so one bit a column masks a whole tile.

Shapes: q, dout, out [B, Sq, N, D]; k, v [B, Sk, H, D]; gathered columns [B, N, C, D]; lse, delta [B, N, Sq]; lists
[B, N, blocks, width], of every head or of none (listed = 1 or 0). M query rows and T key rows a tile, BLOCK tokens a
block, G = N / H query heads a key head. All contiguous.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_pointers(base, first, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Pointers to rows first .. first + ROWS of a [rows, D] matrix.

    The 64-bit product is one scalar; the offsets inside the tile fit 32 bits and leave the loop.
    """
    return base + tl.cast(first, tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def load_rows(base, first, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, CHECK: tl.constexpr):
    """Tile [ROWS, D]; rows past `limit` are zero where CHECK says that there may be any."""
    pointers = tile_pointers(base, first, stride, ROWS, D)
    if CHECK:
        return tl.load(pointers, mask=(first + tl.arange(0, ROWS))[:, None] < limit, other=0.0)
    return tl.load(pointers)


@triton.jit
def tile_of(source, base, row0, column, first, stride, limit, T: tl.constexpr, D: tl.constexpr, CHECK: tl.constexpr,
             TMA: tl.constexpr):  # fmt: skip
    """Tile [T, D]: rows first .. of base by pointers, or of a [rows, width] tensor map from row0 on.

    A tensor map knows no `limit`: it serves where the rows are whole, or where none but zeros can follow.
    """
    if TMA:
        return source.load([row0 + first, column])
    return load_rows(base, first, stride, limit, T, D, CHECK)


@triton.jit
def store_rows(base, first, stride, limit, tile, ROWS: tl.constexpr, D: tl.constexpr):
    pointers = tile_pointers(base, first, stride, ROWS, D)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(first + tl.arange(0, ROWS))[:, None] < limit)


@triton.jit
def load_lse(LSE, rows, limit):
    """Log-sum-exp in base 2; +inf for rows that saw nothing or do not exist, so that their weights are 0."""
    lse = tl.load(LSE + rows, mask=rows < limit, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def row_bits(BITS, rows, limit, chunk, WORDS):
    """int1 [rows]: whether each query row sees the given chunk of keys."""
    word = tl.load(BITS + rows.to(tl.int64) * WORDS + chunk // 32, mask=rows < limit, other=0)
    return ((word >> (chunk % 32)) & 1) != 0


@triton.jit
def online_softmax(scores, factor, v, m, l, acc, PRECISION: tl.constexpr):
    """One step of the running softmax of scores * factor, in base 2. Rows that see nothing stay as they are.

    The factor is positive, so it can follow the maximum and join the subtraction in one instruction.
    """
    m_next = tl.maximum(m, tl.max(scores, 1) * factor)
    m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
    p = tl.math.exp2(scores * factor - m_safe[:, None])
    alpha = tl.math.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_next, l, acc


@triton.jit
def load_carry(OUT_IN, LSE_IN, first, stride, limit, M: tl.constexpr, D: tl.constexpr):
    """(m, l, acc) that continue a finished attention: its out with weight 1 at its own log-sum-exp."""
    rows = first + tl.arange(0, M)
    m = tl.load(LSE_IN + rows, mask=rows < limit, other=float("-inf")) * LOG2E
    acc = load_rows(OUT_IN, first, stride, limit, M, D, True).to(tl.float32)
    return m, tl.where(m == float("-inf"), 0.0, 1.0), acc


@triton.jit
def store_softmax(OUT, LSE, first, stride, limit, state, M: tl.constexpr, D: tl.constexpr):
    m, l, acc = state
    rows = first + tl.arange(0, M)
    store_rows(OUT, first, stride, limit, acc / tl.where(l == 0.0, 1.0, l)[:, None], M, D)
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.math.log2(tl.where(l == 0.0, 1.0, l))) * LN2)
    tl.store(LSE + rows, lse, mask=rows < limit)


@triton.jit
def seen_columns(SEEN, first, T: tl.constexpr):
    """int1 [T]: bits first .. first + T of a query block's column bits."""
    columns = first + tl.arange(0, T)
    return ((tl.load(SEEN + columns // 32) >> (columns % 32)) & 1) != 0


@triton.jit
def forward_kernel(
    Q, K, V, COUNT, INDEX, K_STARTS, BITS, K_COLUMNS, V_COLUMNS, SEEN, VISIBLE, OUT_IN, LSE_IN, OUT, LSE,
    K_MAP, V_MAP, K_COLUMNS_MAP, V_COLUMNS_MAP,
    scale, N, H, Sq, Sk, nq, width, listed, row_chunk, WORDS, C, SEEN_WORDS,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DIAGONAL: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, CARRY: tl.constexpr, HAS_BITS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tiles = nq * (BLOCK // M)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # b * N + n
    tile = tiles - 1 - tl.program_id(0) % tiles  # later queries have longer lists: start with them
    b, n, i = head // N, head % N, tile // (BLOCK // M)
    rows = tile * M + tl.arange(0, M)
    own = b * Sq * N * D + n * D
    h = n * H // N
    K += b * Sk * H * D + h * D
    V += b * Sk * H * D + h * D
    row0, column = (b * Sk).to(tl.int32), (h * D).to(tl.int32)
    BITS += head * Sq * WORDS
    INDEX += (head * listed * nq + i) * width
    q = load_rows(Q + own, tile * M, N * D, Sq, M, D, True)
    if CARRY:
        m, l, acc = load_carry(OUT_IN + own, LSE_IN + head * Sq, tile * M, N * D, Sq, M, D)
    else:
        m, l, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)

    count = tl.load(COUNT + head * listed * nq + i)
    for t in range(0, count * (BLOCK // T)):
        j = tl.load(INDEX + t // (BLOCK // T))
        first = j * BLOCK + (t % (BLOCK // T)) * T
        k = tile_of(K_MAP, K, row0, column, first, H * D, Sk, T, D, False, TMA)
        v = tile_of(V_MAP, V, row0, column, first, H * D, Sk, T, D, False, TMA)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if HAS_BITS:
            seen = row_bits(BITS, rows, Sq, tl.load(K_STARTS + j) // row_chunk, WORDS)
            scores = tl.where(seen[:, None], scores, float("-inf"))
        m, l, acc = online_softmax(scores, scale * LOG2E, v, m, l, acc, PRECISION)
    if HAS_COLUMNS:
        K_COLUMNS += head * C * D
        V_COLUMNS += head * C * D
        row0 = (head * C).to(tl.int32)
        for first in range(0, tl.load(VISIBLE + head * nq + i), T):
            seen = seen_columns(SEEN + (head * nq + i) * SEEN_WORDS, first, T)
            k = tile_of(K_COLUMNS_MAP, K_COLUMNS, row0, 0, first, D, C, T, D, False, TMA)
            v = tile_of(V_COLUMNS_MAP, V_COLUMNS, row0, 0, first, D, C, T, D, False, TMA)
            scores = tl.dot(q, k.T, input_precision=PRECISION) + tl.where(seen, 0.0, float("-inf"))[None, :]
            m, l, acc = online_softmax(scores, scale * LOG2E, v, m, l, acc, PRECISION)
    if DIAGONAL:
        for t in range(0, BLOCK // T):
            k = load_rows(K, i * BLOCK + t * T, H * D, Sk, T, D, True)
            v = load_rows(V, i * BLOCK + t * T, H * D, Sk, T, D, True)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            # both blocks start at the same token, so places inside the block compare as positions do
            seen = (rows - i * BLOCK)[:, None] >= (t * T + tl.arange(0, T))[None, :]
            if HAS_BITS:
                seen &= row_bits(BITS, rows, Sq, tl.load(K_STARTS + i) // row_chunk, WORDS)[:, None]
            m, l, acc = online_softmax(tl.where(seen, scores, float("-inf")), scale * LOG2E, v, m, l, acc, PRECISION)
    store_softmax(OUT + own, LSE + head * Sq, tile * M, N * D, Sq, (m, l, acc), M, D)


@triton.jit
def add_dq(q, dout, k, v, lse, delta, seen, dq, scale, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """dq (without the factor `scale`) of one tile of keys."""
    p = tl.math.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
    if MASK:
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    return tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    Q, K, V, DOUT, LSE, DELTA, COUNT, INDEX, K_STARTS, BITS, K_COLUMNS, V_COLUMNS, SEEN, VISIBLE, DQ_IN, DQ,
    K_MAP, V_MAP, K_COLUMNS_MAP, V_COLUMNS_MAP,
    scale, N, H, Sq, Sk, nq, width, listed, row_chunk, WORDS, C, SEEN_WORDS,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DIAGONAL: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, CARRY: tl.constexpr, HAS_BITS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tiles = nq * (BLOCK // M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles
    b, n, i = head // N, head % N, tile // (BLOCK // M)
    rows = tile * M + tl.arange(0, M)
    own = b * Sq * N * D + n * D
    h = n * H // N
    K += b * Sk * H * D + h * D
    V += b * Sk * H * D + h * D
    row0, column = (b * Sk).to(tl.int32), (h * D).to(tl.int32)
    BITS += head * Sq * WORDS
    INDEX += (head * listed * nq + i) * width
    q, dout = (
        load_rows(Q + own, tile * M, N * D, Sq, M, D, True),
        load_rows(DOUT + own, tile * M, N * D, Sq, M, D, True),
    )
    lse = load_lse(LSE + head * Sq, rows, Sq)
    delta = tl.load(DELTA + head * Sq + rows, mask=rows < Sq, other=0.0)
    dq = tl.zeros([M, D], tl.float32)

    count = tl.load(COUNT + head * listed * nq + i)
    for t in range(0, count * (BLOCK // T)):
        j = tl.load(INDEX + t // (BLOCK // T))
        first = j * BLOCK + (t % (BLOCK // T)) * T
        k = tile_of(K_MAP, K, row0, column, first, H * D, Sk, T, D, False, TMA)
        v = tile_of(V_MAP, V, row0, column, first, H * D, Sk, T, D, False, TMA)
        seen = tl.full([M, 1], 1, tl.int1)
        if HAS_BITS:
            seen = row_bits(BITS, rows, Sq, tl.load(K_STARTS + j) // row_chunk, WORDS)[:, None]
        dq = add_dq(q, dout, k, v, lse, delta, seen, dq, scale, HAS_BITS, PRECISION)
    if HAS_COLUMNS:
        K_COLUMNS += head * C * D
        V_COLUMNS += head * C * D
        row0 = (head * C).to(tl.int32)
        for first in range(0, tl.load(VISIBLE + head * nq + i), T):
            seen = seen_columns(SEEN + (head * nq + i) * SEEN_WORDS, first, T)
            k = tile_of(K_COLUMNS_MAP, K_COLUMNS, row0, 0, first, D, C, T, D, False, TMA)
            v = tile_of(V_COLUMNS_MAP, V_COLUMNS, row0, 0, first, D, C, T, D, False, TMA)
            dq = add_dq(q, dout, k, v, lse, delta, seen[None, :], dq, scale, True, PRECISION)
    if DIAGONAL:
        for t in range(0, BLOCK // T):
            k = load_rows(K, i * BLOCK + t * T, H * D, Sk, T, D, True)
            v = load_rows(V, i * BLOCK + t * T, H * D, Sk, T, D, True)
            seen = (rows - i * BLOCK)[:, None] >= (t * T + tl.arange(0, T))[None, :]
            if HAS_BITS:
                seen &= row_bits(BITS, rows, Sq, tl.load(K_STARTS + i) // row_chunk, WORDS)[:, None]
            dq = add_dq(q, dout, k, v, lse, delta, seen, dq, scale, True, PRECISION)
    dq *= scale
    if CARRY:
        dq += load_rows(DQ_IN + own, tile * M, N * D, Sq, M, D, True)
    store_rows(DQ + own, tile * M, N * D, Sq, dq, M, D)


@triton.jit
def add_dkv(q, dout, k, v, lse, delta, seen, dk, dv, scale, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """dk (without the factor `scale`) and dv of one tile of queries; scores are held transposed, [T, M]."""
    p = tl.math.exp2(tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E) - lse[None, :])
    if MASK:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dp = tl.dot(v, dout.T, input_precision=PRECISION)
    dk = tl.dot((p * (dp - delta[None, :])).to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkv_kernel(
    Q, K, V, DOUT, LSE, DELTA, COUNT, INDEX, K_STARTS, BITS, DK, DV, Q_MAP, DOUT_MAP,
    scale, N, H, Sq, Sk, nk, width, listed, row_chunk, WORDS,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, G: tl.constexpr, DIAGONAL: tl.constexpr,
    EVEN: tl.constexpr, HAS_BITS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tiles = nk * (BLOCK // T)
    kv_head = (tl.program_id(0) // tiles).to(tl.int64)  # b * H + h
    tile = tl.program_id(0) % tiles  # earlier keys have longer lists
    b, h, j = kv_head // H, kv_head % H, tile // (BLOCK // T)
    keys = tile * T + tl.arange(0, T)
    own = b * Sk * H * D + h * D
    k, v = load_rows(K + own, tile * T, H * D, Sk, T, D, True), load_rows(V + own, tile * T, H * D, Sk, T, D, True)
    chunk = tl.load(K_STARTS + j) // row_chunk
    row0 = (b * Sq).to(tl.int32)
    dk, dv = tl.zeros([T, D], tl.float32), tl.zeros([T, D], tl.float32)
    for g in range(0, G):
        n = h * G + g
        head = b * N + n
        shard = b * Sq * N * D + n * D
        if DIAGONAL:
            for t in range(0, tl.where(j * BLOCK < Sq, BLOCK // M, 0)):  # own keys come before those of others
                begin = j * BLOCK + t * M
                rows = begin + tl.arange(0, M)
                q = load_rows(Q + shard, begin, N * D, Sq, M, D, True)
                dout = load_rows(DOUT + shard, begin, N * D, Sq, M, D, True)
                lse = load_lse(LSE + head * Sq, rows, Sq)
                delta = tl.load(DELTA + head * Sq + rows, mask=rows < Sq, other=0.0)
                seen = rows[None, :] >= keys[:, None]
                if HAS_BITS:
                    seen &= row_bits(BITS + head * Sq * WORDS, rows, Sq, chunk, WORDS)[None, :]
                dk, dv = add_dkv(q, dout, k, v, lse, delta, seen, dk, dv, scale, True, PRECISION)
        count = tl.load(COUNT + head * listed * nk + j)
        for t in range(0, count * (BLOCK // M)):
            block = tl.load(INDEX + (head * listed * nk + j) * width + t // (BLOCK // M))
            begin = block * BLOCK + (t % (BLOCK // M)) * M
            rows = begin + tl.arange(0, M)
            q = tile_of(Q_MAP, Q + shard, row0, (n * D).to(tl.int32), begin, N * D, Sq, M, D, not EVEN, TMA)
            dout = tile_of(DOUT_MAP, DOUT + shard, row0, (n * D).to(tl.int32), begin, N * D, Sq, M, D, not EVEN, TMA)
            lse = load_lse(LSE + head * Sq, rows, Sq)
            delta = tl.load(DELTA + head * Sq + rows, mask=rows < Sq, other=0.0)
            seen = tl.full([1, M], 1, tl.int1)
            if HAS_BITS:
                seen = row_bits(BITS + head * Sq * WORDS, rows, Sq, chunk, WORDS)[None, :]
            dk, dv = add_dkv(q, dout, k, v, lse, delta, seen, dk, dv, scale, HAS_BITS, PRECISION)
    store_rows(DK + own, tile * T, H * D, Sk, dk * scale, T, D)
    store_rows(DV + own, tile * T, H * D, Sk, dv, T, D)
