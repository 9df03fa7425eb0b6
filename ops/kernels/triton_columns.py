"""Device code that adds the gradients of gathered columns into the rows that they came from, in a fixed order.

Several heads of a group may keep the same token, so tokens look for their columns, not columns for their tokens:

    where[b, n, token]    the column of head n that holds the token, -1 if none
    row of key head h     += sum over its query heads n of grads[b, n, where[b, n, token]]

One program owns some tokens of a key head; nothing is added atomically and untouched rows are not read.
"""

import torch
import triton
import triton.language as tl


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
