"""Passes over whole rows of attention: merging two partial results, and the dot product of two tensors' rows."""

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.kernels.triton_blocks import load_rows, store_rows
from mtraining_nns.ops.merge import Partial


@triton.jit
def merge_kernel(OUT_A, LSE_A, OUT_B, LSE_B, OUT, LSE, S, N, M: tl.constexpr, D: tl.constexpr):
    tiles = tl.cdiv(S, M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    own = head // N * S * N * D + head % N * D
    rows = tile * M + tl.arange(0, M)
    a = tl.load(LSE_A + head * S + rows, mask=rows < S, other=float("-inf"))
    b = tl.load(LSE_B + head * S + rows, mask=rows < S, other=float("-inf"))
    top = tl.maximum(a, b)
    top = tl.where(top == float("-inf"), 0.0, top)  # a row that saw nothing weighs nothing
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    out_a = load_rows(OUT_A + own, tile * M, N * D, S, M, D, True).to(tl.float32)
    out_b = load_rows(OUT_B + own, tile * M, N * D, S, M, D, True).to(tl.float32)
    out = out_a * (weight_a * share)[:, None] + out_b * (weight_b * share)[:, None]
    store_rows(OUT + own, tile * M, N * D, S, out, M, D)
    tl.store(
        LSE + head * S + rows,
        tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total))),
        mask=rows < S,
    )


def merge(a: Partial | None, b: Partial, dtype: torch.dtype | None) -> Partial:
    """What ops.merge.merge says, in one pass; None is nothing to merge with.

    dtype: of out, by default what loses nothing: fp32, or b's own where b is all there is.
    """
    if a is None:
        return Partial(b.out if dtype is None else b.out.to(dtype), b.lse)
    batch, length, heads, dim = b.out.shape
    out = torch.empty(b.out.shape, dtype=dtype or torch.float32, device=b.out.device)
    lse = torch.empty(b.lse.shape, device=b.lse.device)
    programs = batch * heads * triton.cdiv(length, 64)
    merge_kernel[(programs,)](*(x.contiguous() for x in (*a, *b)), out, lse, length, heads, M=64, D=dim)
    return Partial(out, lse)


@triton.jit
def row_dot_kernel(A, B, OUT, S, N, M: tl.constexpr, D: tl.constexpr):
    tiles = tl.cdiv(S, M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    own = head // N * S * N * D + head % N * D
    a = load_rows(A + own, tile * M, N * D, S, M, D, True).to(tl.float32)
    b = load_rows(B + own, tile * M, N * D, S, M, D, True).to(tl.float32)
    rows = tile * M + tl.arange(0, M)
    tl.store(OUT + head * S + rows, tl.sum(a * b, 1), mask=rows < S)


def row_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32 [B, N, S]: sum over D of a * b, both [B, S, N, D] and contiguous, D a power of two."""
    batch, length, heads, dim = a.shape
    out = torch.empty(batch, heads, length, device=a.device)
    row_dot_kernel[(batch * heads * triton.cdiv(length, 64),)](a, b, out, length, heads, M=64, D=dim)
    return out
