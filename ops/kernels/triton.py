"""Sparse attention on Triton: checks, tile sizes and launches. The device code is in triton_blocks and triton_columns.

The default on CUDA devices, from compute capability 8.0. On CPU tensors it runs only under TRITON_INTERPRET=1, for
kernel tests: milliseconds a tile, far too slow to train.
"""

from typing import NamedTuple

import torch

from mtraining_nns.ops.index import BlockIndex, ColumnIndex
from mtraining_nns.ops.kernels import Grads, Tape, triton_blocks, triton_columns
from mtraining_nns.ops.merge import Partial

HEAD_DIMS = (16, 32, 64, 128)


class Tiles(NamedTuple):
    """Query rows, key rows, warps and pipeline stages of one kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


# 16-bit inputs on Hopper by (kernel, head dim); chosen by tests/bench/attention.py --sweep
TILES = {
    ("forward", 64): Tiles(128, 128, 4, 3),
    ("forward", 128): Tiles(128, 32, 4, 3),
    ("dq", 64): Tiles(64, 64, 4, 2),
    ("dq", 128): Tiles(128, 128, 8, 2),
    ("dkv", 64): Tiles(64, 64, 4, 3),
    ("dkv", 128): Tiles(64, 64, 4, 2),
}
PORTABLE = Tiles(64, 32, 4, 1)  # fp32 inputs and small head dims: few registers and little shared memory


def blocks_forward(q, kv, index: BlockIndex, *, scale, carry=None, out_dtype=None) -> Partial:
    """Attention over the listed blocks, merged with `carry`."""
    q, (k, v) = _check(q, kv, index.block)
    tiles = _tiles("forward", q, index.block)
    out = torch.empty(q.shape, dtype=out_dtype or torch.float32, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    out_in, lse_in = (out, lse) if carry is None else (x.contiguous() for x in carry)
    triton_blocks.blocks_forward[(_programs(q, index, tiles),)](
        q, k, v, index.count, index.index, index.q_starts, index.k_starts, _bits(index), out_in, lse_in, out, lse,
        *_sizes(q, k, index, scale), BLOCK=index.block, M=tiles.rows, T=tiles.keys, D=q.shape[3],
        CARRY=carry is not None, HAS_BITS=index.row_bits is not None, PRECISION=_precision(q), **_launch(tiles),
    )  # fmt: skip
    return Partial(out, lse)


def blocks_backward(q, kv, index: BlockIndex, tape: Tape, grads: Grads) -> None:
    """Gradients over the listed blocks, added into `grads`."""
    q, (k, v) = _check(q, kv, index.block)
    tiles = _tiles("dq", q, index.block)
    tensors = q, k, v, tape.dout, tape.lse, tape.delta
    flags = {"HAS_BITS": index.row_bits is not None, "PRECISION": _precision(q)}
    sizes = _sizes(q, k, index, tape.scale)
    triton_blocks.blocks_dq[(_programs(q, index, tiles),)](
        *tensors, index.count, index.index, index.q_starts, index.k_starts, _bits(index), grads.dq,
        *sizes, BLOCK=index.block, M=tiles.rows, T=tiles.keys, D=q.shape[3], **flags, **_launch(tiles),
    )  # fmt: skip
    tiles = _tiles("dkv", q, index.block)
    programs = k.shape[0] * k.shape[2] * len(index.k_starts) * (index.block // tiles.keys)
    triton_blocks.blocks_dkv[(programs,)](
        *tensors, *index.transpose(), index.q_starts, index.k_starts, _bits(index), grads.dk, grads.dv,
        *sizes, BLOCK=index.block, M=tiles.rows, T=tiles.keys, D=q.shape[3], G=q.shape[2] // k.shape[2],
        EVEN=q.shape[1] % index.block == 0, **flags, **_launch(tiles),
    )  # fmt: skip


def columns_forward(q, kv, columns: ColumnIndex, q_starts, *, scale, carry=None) -> Partial:
    """Attention to the gathered columns, merged with `carry`."""
    q, (k, v) = _check(q, kv, columns.block)
    tiles = _tiles("forward", q, columns.block)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    out_in, lse_in = (out, lse) if carry is None else (x.contiguous() for x in carry)
    triton_columns.columns_forward[(_programs(q, columns, tiles, len(q_starts)),)](
        q, k, v, columns.position, _table(columns), columns.visible(q_starts), q_starts, out_in, lse_in, out, lse,
        *_column_sizes(q, columns, q_starts, scale), BLOCK=columns.block, M=tiles.rows, T=tiles.keys, D=q.shape[3],
        CARRY=carry is not None, PRECISION=_precision(q), **_launch(tiles),
    )  # fmt: skip
    return Partial(out, lse)


def columns_backward(q, kv, columns: ColumnIndex, q_starts, tape: Tape, grads: Grads) -> None:
    """Gradients of the gathered columns, added into `grads`."""
    q, (k, v) = _check(q, kv, columns.block)
    tiles = _tiles("dq", q, columns.block)
    tensors = q, k, v, tape.dout, tape.lse, tape.delta, columns.position, _table(columns)
    sizes = _column_sizes(q, columns, q_starts, tape.scale)
    triton_columns.columns_dq[(_programs(q, columns, tiles, len(q_starts)),)](
        *tensors, columns.visible(q_starts), q_starts, grads.dq,
        *sizes, BLOCK=columns.block, M=tiles.rows, T=tiles.keys, D=q.shape[3],
        PRECISION=_precision(q), **_launch(tiles),
    )  # fmt: skip
    tiles = _tiles("dkv", q, columns.block)
    heads, width = q.shape[0] * q.shape[2], k.shape[2]
    programs = heads * -(-width // tiles.keys)
    split = max(1, min(8, 1024 // programs))  # few columns: share a tile's queries among programs to fill the GPU
    parts = torch.empty(2, split, *k.shape, device=q.device)
    triton_columns.columns_dkv[(split * programs,)](
        *tensors, columns.first_block(q_starts, tiles.keys), q_starts, *parts,
        *sizes, heads, BLOCK=columns.block, M=tiles.rows, T=tiles.keys, D=q.shape[3],
        SPLIT=split, EVEN=q.shape[1] % columns.block == 0, PRECISION=_precision(q), **_launch(tiles),
    )  # fmt: skip
    for grad, part in zip(grads[1:], parts, strict=True):
        grad += part.sum(0)


def _check(q, kv, block: int):
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"the triton backend does head dims {HEAD_DIMS}, got {q.shape[3]}; use attention.backend=torch"
        )
    if block > 128 and block % 128:
        raise ValueError(f"the triton backend needs a block of 16 to 128 or a multiple of 128, got {block}")
    return q.contiguous(), tuple(x.contiguous() for x in kv)


def _tiles(kernel: str, q, block: int) -> Tiles:
    tiles = TILES.get((kernel, q.shape[3]), PORTABLE) if q.element_size() == 2 else PORTABLE
    return tiles._replace(rows=min(tiles.rows, block), keys=min(tiles.keys, block))


def _programs(q, index, tiles: Tiles, blocks: int | None = None) -> int:
    return q.shape[0] * q.shape[2] * (blocks or len(index.q_starts)) * (index.block // tiles.rows)


def _sizes(q, k, index: BlockIndex, scale: float):
    words = 0 if index.row_bits is None else index.row_bits.shape[-1]
    lists = len(index.q_starts), len(index.k_starts)
    return scale, q.shape[2], k.shape[2], q.shape[1], k.shape[1], *lists, max(index.row_chunk, 1), words


def _column_sizes(q, columns: ColumnIndex, q_starts, scale: float):
    return scale, q.shape[2], q.shape[1], columns.position.shape[-1], len(q_starts), columns.hit.shape[-1]


def _bits(index: BlockIndex):
    return index.count if index.row_bits is None else index.row_bits.contiguous()


def _table(columns: ColumnIndex):
    return columns.hit.contiguous().view(torch.uint8)


def _precision(q) -> str:
    """fp32 inputs are multiplied in fp32, not in the tf32 that Triton would choose."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _launch(tiles: Tiles) -> dict[str, int]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}
