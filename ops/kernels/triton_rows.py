"""Passes over whole rows of attention: merging partial results, row sums, and rows laid out head by head."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.kernels.triton_blocks import load_lse, load_rows, store_rows
from mtraining_nns.ops.merge import Partial


@triton.jit
def merge_kernel(OUT_A, LSE_A, OUT_B, LSE_B, OUT, LSE, S, N, out_batch, out_row, M: tl.constexpr, D: tl.constexpr):
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
    OUT += head // N * out_batch + head % N * D
    store_rows(OUT, tile * M, out_row, S, out, M, D)
    tl.store(
        LSE + head * S + rows,
        tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total))),
        mask=rows < S,
    )


def merge(a: Partial | None, b: Partial, into: torch.Tensor | None) -> Partial:
    """What ops.merge.merge says, in one pass; None is nothing to merge with.

    into: where out goes, by default a tensor that loses nothing: fp32, or b's own where b is all there is.
    """
    if a is None:
        return b if into is None or into is b.out else Partial(into.copy_(b.out), b.lse)
    batch, length, heads, dim = b.out.shape
    out = torch.empty(b.out.shape, dtype=torch.float32, device=b.out.device) if into is None else into
    lse = torch.empty_like(b.lse, memory_format=torch.contiguous_format)
    programs = batch * heads * triton.cdiv(length, 64)
    merge_kernel[(programs,)](
        *(x.contiguous() for x in (*a, *b)), out, lse, length, heads, *out.stride()[:2], M=64, D=dim
    )
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
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=a.device)
    row_dot_kernel[(batch * heads * triton.cdiv(length, 64),)](a, b, out, length, heads, M=64, D=dim)
    return out


class HeadRows(NamedTuple):
    """What a backward pass reads row by row, laid out head by head, S' rows a head: S and a filling that adds nothing.

    q, dout: [B, N, S', D]; lse in base 2, delta: fp32 [B, N, S'].
    """

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


@triton.jit
def head_rows_kernel(
    Q, DOUT, OUT, LSE, Q_ROWS, DOUT_ROWS, LSE_ROWS, DELTA_ROWS,
    S, N, filled, q_batch, q_row, dout_batch, dout_row, out_batch, out_row, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    tiles = filled // M
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, n = head // N, head % N
    rows = tile * M + tl.arange(0, M)
    q = load_rows(Q + b * q_batch + n * D, tile * M, q_row, S, M, D, True)
    dout = load_rows(DOUT + b * dout_batch + n * D, tile * M, dout_row, S, M, D, True)
    out = load_rows(OUT + b * out_batch + n * D, tile * M, out_row, S, M, D, True)
    store_rows(Q_ROWS + head * filled * D, tile * M, D, filled, q, M, D)
    store_rows(DOUT_ROWS + head * filled * D, tile * M, D, filled, dout, M, D)
    tl.store(LSE_ROWS + head * filled + rows, load_lse(LSE + head * S, rows, S))
    tl.store(DELTA_ROWS + head * filled + rows, tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1))


def head_rows(q, dout, out, lse, filling: int) -> HeadRows:
    """q, dout, out [B, S, N, D], slices of more heads perhaps; lse fp32 [B, N, S]; S' a multiple of `filling`."""
    batch, length, heads, dim = q.shape
    filled = triton.cdiv(length, filling) * filling
    shape, device = (batch, heads, filled), q.device
    rows = HeadRows(
        *(torch.empty(*shape, dim, dtype=q.dtype, device=device) for _ in range(2)),
        *(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)),
    )
    strides = [stride for x in (q, dout, out) for stride in x.stride()[:2]]
    head_rows_kernel[(batch * heads * (filled // 64),)](
        q, dout, out, lse.contiguous(), *rows, length, heads, filled, *strides, M=64, D=dim
    )
    return rows
