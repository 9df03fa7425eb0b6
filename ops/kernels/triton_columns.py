"""Device code of gathered columns' gradients: dK and dV, and adding them into the rows that the columns came from.

Shapes and names of the first kernel are those of triton_blocks. For the second, several heads of a group may keep the
same token, so tokens look for their columns, not columns for their tokens:

    where[b, n, token]    the column of head n that holds the token, -1 if none
    row of key head h     += sum over its query heads n of grads[b, n, where[b, n, token]]

One program owns some tokens of a key head; nothing is added atomically and untouched rows are not read.
"""

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.kernels.triton_blocks import add_dkv, load_lse, load_rows, seen_columns, store_rows, tile_of


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
        column = tl.load(WHERE + head * (S + 1) + tokens, mask=tokens < S, other=-1)
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


def add_rows(grads: torch.Tensor, row: torch.Tensor, mine: torch.Tensor, dkv: torch.Tensor) -> None:
    """Add grads [2, B, N, C, D] into dkv [2, B, S, H, D] at row int64 [B, N, C] where mine; rows of a head differ.

    dkv: any float dtype, rounded once after the sum in fp32; contiguous but for its batch and its first dim.
    """
    _, batch, heads, columns, dim = grads.shape
    length, kv_heads = dkv.shape[2:4]
    assert dkv[0, 0].is_contiguous()
    where = torch.full((batch, heads, length + 1), -1, dtype=torch.int32, device=grads.device)
    index = torch.arange(columns, dtype=torch.int32, device=grads.device).expand(row.shape)
    where.scatter_(2, torch.where(mine, row, length), index)  # the last entry takes what other ranks own
    grads, tokens = grads.contiguous(), 32
    add_rows_kernel[(batch * kv_heads * triton.cdiv(length, tokens),)](
        grads, where, *dkv, heads, kv_heads, columns, length, dkv.stride(1), grads.stride(0),
        G=heads // kv_heads, M=tokens, D=dim,
    )  # fmt: skip
