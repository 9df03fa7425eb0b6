"""Device code of gathered columns: fetching their rows, dK and dV, and adding these into the rows they came from.

Shapes and names of columns_dkv_kernel are those of triton_blocks. Several heads of a group may keep the same token, so
for the sum tokens look for their columns, not columns for their tokens:

    where[b, n, token]    the column of head n that holds the token, -1 if none
    row of key head h     += sum over its query heads n of grads[b, n, where[b, n, token]]

One program owns some tokens of a key head; nothing is added atomically and untouched rows are not read.
"""

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.index import NO_COLUMN
from mtraining_nns.ops.kernels.triton_blocks import add_dkv, load_lse, load_rows, seen_columns, store_rows, tile_of

NOWHERE = tl.constexpr(NO_COLUMN)


@triton.jit
def local_rows(POSITION, OWN, columns, C, BLOCK: tl.constexpr):
    """int32: local rows of some columns of a head, negative where another rank has them or there is no column."""
    position = tl.load(POSITION + columns, mask=columns < C, other=NOWHERE)
    place = tl.load(OWN + position // BLOCK, mask=position != NOWHERE, other=-1)
    return tl.where(place < 0, -1, place * BLOCK + position % BLOCK)


@triton.jit
def gather_rows_kernel(
    POSITION, OWN, K, V, OUT, N, H, C, S, part_stride, BLOCK: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Program (head, tile of columns)."""
    tiles = tl.cdiv(C, T)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // N, head % N // (N // H)
    columns = tl.program_id(0) % tiles * T + tl.arange(0, T)
    row = local_rows(POSITION + head * C, OWN, columns, C, BLOCK)
    dims = tl.arange(0, D)[None, :]
    source = b * S * H * D + h * D + (row.to(tl.int64) * H * D)[:, None] + dims
    target = ((head * C + columns) * D)[:, None] + dims
    exists = (columns < C)[:, None]
    for part in tl.static_range(2):
        rows = tl.load((V if part else K) + source, mask=(row >= 0)[:, None], other=0.0)
        tl.store(OUT + part * part_stride + target, rows, mask=exists)


def gather_rows(position, own, block: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[2, B, N, C, D]: this rank's rows of k and v [B, S, H, D] at the columns, zero where it has none.

    position: int32 [B, N, C]; own: int32 [n], where this rank keeps each global block, -1 elsewhere.
    """
    (batch, heads, columns), (_, length, kv_heads, dim) = position.shape, k.shape
    out, tile = torch.empty(2, *position.shape, dim, dtype=k.dtype, device=k.device), 32
    gather_rows_kernel[(batch * heads * triton.cdiv(columns, tile),)](
        position, own, k.contiguous(), v.contiguous(), out, heads, kv_heads, columns, length, out.stride(0),
        BLOCK=block, T=tile, D=dim,
    )  # fmt: skip
    return out


@triton.jit
def columns_dkv_kernel(
    Q, K, V, DOUT, LSE, DELTA, SEEN, FIRST, DK, DV, Q_MAP, DOUT_MAP,
    scale, N, Sq, C, nq, SEEN_WORDS, heads,
    BLOCK: tl.constexpr, M: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Program (split, head, tile): a tile of columns against every SPLIT-th query block; dk, dv [SPLIT, B, N, C, D]."""
    tiles = SEEN_WORDS * 32 // T
    split = (tl.program_id(0) // (tiles * heads)).to(tl.int64)
    head = (tl.program_id(0) // tiles % heads).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, n = head // N, head % N
    k, v = (
        load_rows(K + head * C * D, tile * T, D, C, T, D, False),
        load_rows(V + head * C * D, tile * T, D, C, T, D, False),
    )
    Q += b * Sq * N * D + n * D
    DOUT += b * Sq * N * D + n * D
    row0, column = (b * Sq).to(tl.int32), (n * D).to(tl.int32)
    dk, dv = tl.zeros([T, D], tl.float32), tl.zeros([T, D], tl.float32)
    begin = tl.load(FIRST + head * tiles + tile) + split.to(tl.int32)
    steps = tl.maximum(tl.cdiv(nq - begin, SPLIT), 0) * (BLOCK // M)
    for t in range(0, steps):
        i = begin + t // (BLOCK // M) * SPLIT
        row = i * BLOCK + (t % (BLOCK // M)) * M
        rows = row + tl.arange(0, M)
        seen = seen_columns(SEEN + (head * nq + i) * SEEN_WORDS, tile * T, T)
        q = tile_of(Q_MAP, Q, row0, column, row, N * D, Sq, M, D, not EVEN, TMA)
        dout = tile_of(DOUT_MAP, DOUT, row0, column, row, N * D, Sq, M, D, not EVEN, TMA)
        lse = load_lse(LSE + head * Sq, rows, Sq)
        delta = tl.load(DELTA + head * Sq + rows, mask=rows < Sq, other=0.0)
        dk, dv = add_dkv(q, dout, k, v, lse, delta, seen[:, None], dk, dv, scale, True, PRECISION)
    out = (split * heads + head) * C * D
    store_rows(DK + out, tile * T, D, C, dk * scale, T, D)
    store_rows(DV + out, tile * T, D, C, dv, T, D)


@triton.jit
def find_columns_kernel(POSITION, OWN, WHERE, C, S, BLOCK: tl.constexpr, T: tl.constexpr):
    """Program (head, tile of columns)."""
    tiles = tl.cdiv(C, T)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * T + tl.arange(0, T)
    row = local_rows(POSITION + head * C, OWN, columns, C, BLOCK)
    tl.store(WHERE + head * S + row, columns, mask=row >= 0)


@triton.jit
def add_rows_kernel(
    GRADS, WHERE, DK, DV, N, H, C, S, batch_stride, part_stride,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, M)
    kv_head = (tl.program_id(0) // tiles).to(tl.int64)  # b * H + h
    tokens = tl.program_id(0) % tiles * M + tl.arange(0, M)
    b, h = kv_head // H, kv_head % H
    dk, dv = tl.zeros([M, D], tl.float32), tl.zeros([M, D], tl.float32)
    touched = tl.zeros([M], tl.int32)
    for g in range(0, G):
        head = b * N + h * G + g
        column = tl.load(WHERE + head * S + tokens, mask=tokens < S, other=-1)
        found = column >= 0
        rows = (head * C + column) * D
        offsets = rows[:, None] + tl.arange(0, D)[None, :]
        dk += tl.load(GRADS + offsets, mask=found[:, None], other=0.0).to(tl.float32)
        dv += tl.load(GRADS + part_stride + offsets, mask=found[:, None], other=0.0).to(tl.float32)
        touched += found.to(tl.int32)
    own = b * batch_stride + h * D + (tokens.to(tl.int64) * H * D)[:, None] + tl.arange(0, D)[None, :]
    mask = (touched > 0)[:, None]
    dk += tl.load(DK + own, mask=mask, other=0.0).to(tl.float32)
    dv += tl.load(DV + own, mask=mask, other=0.0).to(tl.float32)
    tl.store(DK + own, dk.to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + own, dv.to(DV.dtype.element_ty), mask=mask)


def add_rows(grads: torch.Tensor, position, own, block: int, dkv: torch.Tensor) -> None:
    """Add grads [2, B, N, C, D] of the columns into this rank's rows of dkv [2, B, S, H, D].

    position, own: as for gather_rows; the columns of a head differ. dkv: any float dtype, rounded once after the sum in
    fp32; contiguous but for its batch and its first dim.
    """
    _, batch, heads, columns, dim = grads.shape
    length, kv_heads = dkv.shape[2:4]
    assert dkv[0, 0].is_contiguous()
    where = torch.full((batch, heads, length), -1, dtype=torch.int32, device=grads.device)
    tile, tokens = 128, 32
    find_columns_kernel[(batch * heads * triton.cdiv(columns, tile),)](
        position, own, where, columns, length, BLOCK=block, T=tile
    )
    grads = grads.contiguous()
    add_rows_kernel[(batch * kv_heads * triton.cdiv(length, tokens),)](
        grads, where, *dkv, heads, kv_heads, columns, length, dkv.stride(1), grads.stride(0),
        G=heads // kv_heads, M=tokens, D=dim,
    )  # fmt: skip
