"""Sparse attention on Triton: checks, tile sizes and launches. The device code is in triton_blocks and triton_columns.

The portable backend of CUDA devices, from compute capability 8.0. On CPU tensors it runs only under
TRITON_INTERPRET=1, for kernel tests: milliseconds a tile, far too slow to train.
"""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from mtraining_nns.ops.index import BlockIndex, ColumnTiles, Lists
from mtraining_nns.ops.kernels import triton_blocks, triton_columns
from mtraining_nns.ops.kernels.backends import triton_shape_fault
from mtraining_nns.ops.kernels.contract import GatheredColumns, Grads, Keys, Tape, Traits
from mtraining_nns.ops.kernels.contract import no_front_rows as front_rows  # noqa: F401
from mtraining_nns.ops.kernels.sizes import lists_alone as workspace_bytes  # noqa: F401
from mtraining_nns.ops.merge import Partial


class Tiles(NamedTuple):
    """Query rows, key rows, warps and pipeline stages of one kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


# 16-bit inputs on Hopper by (kernel, head dim); chosen by tests/bench/attention.py --sweep
TILES = {
    ("forward", 64): Tiles(128, 128, 4, 3),
    ("forward", 128): Tiles(128, 128, 8, 2),
    ("dq", 64): Tiles(64, 128, 4, 2),
    ("dq", 128): Tiles(64, 64, 4, 2),
    ("dkv", 64): Tiles(64, 64, 4, 3),
    ("dkv", 128): Tiles(64, 64, 4, 2),
}
PORTABLE = Tiles(64, 32, 4, 1)  # fp32 inputs and small head dims: few registers and little shared memory
LEAST = Tiles(32, 32, 4, 1)  # fp32 of head dim 128, so that its gradients fit the 99 KiB of capability 8.6
TRAITS = Traits()


def forward(q, keys: Keys, *, scale, carry=None, into=None) -> Partial:
    """Attention over the listed blocks and the columns, merged with `carry`."""
    q, keys = _checked(q, keys)
    tiles = _tiles("forward", q, keys.blocks.block)
    out = _place(q, into)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    carried = (out, lse) if carry is None else (x.contiguous() for x in carry)
    triton_blocks.forward_kernel[(_programs(q, keys.blocks, tiles),)](
        q, keys.k, keys.v, *keys.blocks.by_query, *_query_side(keys), *carried, out, lse,
        *_key_maps(q, keys, tiles), *_sizes(q, keys, keys.blocks.by_query, scale), *_column_sizes(keys),
        HAS_COLUMNS=keys.columns is not None, CARRY=carry is not None, TMA=_has_tma(q), **_flags(q, keys, tiles),
    )  # fmt: skip
    return Partial(_placed(out, into), lse)


def begin(q, tape: Tape) -> None:
    """Nothing is carried; delta is computed."""
    tape.delta  # noqa: B018


def backward(q, keys: Keys, tape: Tape, *, carry, into=None) -> Grads:
    """Gradients over the listed blocks and the columns."""
    q, keys = _checked(q, keys)
    tensors = tape.dout.contiguous(), tape.lse, tape.delta
    columns = None if keys.columns is None else _columns_dkv(q, keys, tensors, tape.scale)
    return Grads(_dq(q, keys, tensors, tape.scale, carry, into), _dkv(q, keys, tensors, tape.scale), columns)


def _place(q, into):
    """Where kernels write out or dq: contiguous, fp32 unless it is the last call's."""
    if into is not None and into.is_contiguous():
        return into
    return torch.empty(q.shape, dtype=torch.float32 if into is None else into.dtype, device=q.device)


def _placed(result, into):
    return result if into is None or result is into else into.copy_(result)


def _dq(q, keys: Keys, tensors, scale, carry, into):
    tiles = _tiles("dq", q, keys.blocks.block)
    dq = _place(q, into)
    carried = dq if carry is None else carry.contiguous()
    triton_blocks.dq_kernel[(_programs(q, keys.blocks, tiles),)](
        q, keys.k, keys.v, *tensors, *keys.blocks.by_query, *_query_side(keys), carried, dq,
        *_key_maps(q, keys, tiles), *_sizes(q, keys, keys.blocks.by_query, scale), *_column_sizes(keys),
        HAS_COLUMNS=keys.columns is not None, CARRY=carry is not None, TMA=_has_tma(q), **_flags(q, keys, tiles),
    )  # fmt: skip
    return _placed(dq, into)


def _dkv(q, keys: Keys, tensors, scale):
    blocks, k = keys.blocks, keys.k
    tiles = _tiles("dkv", q, blocks.block)
    dkv = torch.empty(2, *k.shape, dtype=torch.float32, device=q.device)
    programs = k.shape[0] * k.shape[2] * len(blocks.k_starts) * (blocks.block // tiles.keys)
    triton_blocks.dkv_kernel[(programs,)](
        q, k, keys.v, *tensors, *blocks.by_key, blocks.k_starts, _bits(blocks), *dkv,
        *_query_maps(q, tensors[0], tiles, blocks.block), *_sizes(q, keys, blocks.by_key, scale),
        G=q.shape[2] // k.shape[2], EVEN=q.shape[1] % blocks.block == 0, TMA=_has_query_tma(q, blocks.block),
        **_flags(q, keys, tiles),
    )  # fmt: skip
    return dkv


def _columns_dkv(q, keys: Keys, tensors, scale):
    (k, v), seen, block = keys.columns.kv, keys.columns.tiles, keys.blocks.block
    tiles = _tiles("dkv", q, block)
    heads, words = q.shape[0] * q.shape[2], seen.bits.shape[-1]
    programs = heads * (words * 32 // tiles.keys)
    split = max(1, min(8, 1024 // programs))  # few columns: share a tile's queries among programs to fill the GPU
    parts = torch.empty(2, split, *k.shape, dtype=torch.float32, device=q.device)
    triton_columns.columns_dkv_kernel[(split * programs,)](
        q, k, v, *tensors, seen.bits, seen.first_block(tiles.keys), *parts, *_query_maps(q, tensors[0], tiles, block),
        scale, q.shape[2], q.shape[1], k.shape[2], len(keys.blocks.q_starts), words, heads,
        BLOCK=block, M=tiles.rows, T=tiles.keys, D=q.shape[3], SPLIT=split, EVEN=q.shape[1] % block == 0,
        PRECISION=_precision(q), TMA=_has_query_tma(q, block), **_launch(tiles),
    )  # fmt: skip
    return parts.sum(1)


def _checked(q, keys: Keys):
    fault = triton_shape_fault(keys.blocks.block, q.shape[3])
    if fault:
        raise ValueError(f"attention.backend=triton cannot run: {fault}; use attention.backend=torch")
    columns = keys.columns
    if columns is not None:
        columns = GatheredColumns(columns.kv.contiguous(), ColumnTiles(*(x.contiguous() for x in columns.tiles)))
    return q.contiguous(), Keys(keys.k.contiguous(), keys.v.contiguous(), keys.blocks, columns)


def _tiles(kernel: str, q, block: int) -> Tiles:
    if q.element_size() == 2:
        tiles = TILES.get((kernel, q.shape[3]), PORTABLE)
    else:
        tiles = LEAST if q.shape[3] == 128 else PORTABLE
    return tiles._replace(rows=min(tiles.rows, block), keys=min(tiles.keys, block))


def _programs(q, blocks: BlockIndex, tiles: Tiles) -> int:
    return q.shape[0] * q.shape[2] * len(blocks.q_starts) * (blocks.block // tiles.rows)


def _query_side(keys: Keys):
    """The tensors that only kernels which walk the keys of a query tile read; others stand in for missing ones."""
    blocks, columns = keys.blocks, keys.columns
    if columns is None:
        return blocks.k_starts, _bits(blocks), *[blocks.k_starts] * 4
    return blocks.k_starts, _bits(blocks), *columns.kv, columns.tiles.bits, columns.tiles.visible


def _has_tma(q) -> bool:
    """Whether tensor maps serve, Hopper's bulk copies: they leave the registers to the scores."""
    return q.is_cuda and q.element_size() == 2 and torch.cuda.get_device_capability(q.device) >= (9, 0)


def _key_maps(q, keys: Keys, tiles: Tiles):
    """Tensor maps of keys, values and columns; the tensors stand in where there are none."""
    columns = (keys.k, keys.v) if keys.columns is None else keys.columns.kv
    if not _has_tma(q):
        return keys.k, keys.v, *columns
    by_token = [x.flatten(0, 1).flatten(1) for x in (keys.k, keys.v)]
    return [_map(x, tiles.keys, q.shape[3]) for x in (*by_token, *(x.view(-1, x.shape[-1]) for x in columns))]


def _query_maps(q, dout, tiles: Tiles, block: int):
    """Tensor maps of q and dout, likewise."""
    if not _has_query_tma(q, block):
        return q, dout
    return [_map(x.flatten(0, 1).flatten(1), tiles.rows, q.shape[3]) for x in (q, dout)]


def _has_query_tma(q, block: int) -> bool:
    # a ragged last block of a batch would be followed by the next sequence's rows
    return _has_tma(q) and (q.shape[0] == 1 or q.shape[1] % block == 0)


def _map(x, rows: int, dim: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, dim])


def _sizes(q, keys: Keys, lists: Lists, scale: float):
    blocks = keys.blocks
    words = 0 if blocks.row_bits is None else blocks.row_bits.shape[-1]
    listed = int(lists.count.shape[:2] == (q.shape[0], q.shape[2]))
    heads = q.shape[2], keys.k.shape[2]
    return scale, *heads, q.shape[1], keys.k.shape[1], *lists.index.shape[2:], listed, max(blocks.row_chunk, 1), words


def _column_sizes(keys: Keys):
    return (0, 0) if keys.columns is None else (keys.columns.kv.shape[3], keys.columns.tiles.bits.shape[-1])


def _flags(q, keys: Keys, tiles: Tiles) -> dict:
    return {
        "BLOCK": keys.blocks.block,
        "M": tiles.rows,
        "T": tiles.keys,
        "D": q.shape[3],
        "DIAGONAL": keys.blocks.diagonal,
        "HAS_BITS": keys.blocks.row_bits is not None,
        "PRECISION": _precision(q),
        **_launch(tiles),
    }


def _bits(blocks: BlockIndex):
    return blocks.k_starts if blocks.row_bits is None else blocks.row_bits.contiguous()


def _precision(q) -> str:
    """fp32 inputs are multiplied in fp32, not in the tf32 that Triton would choose."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _launch(tiles: Tiles) -> dict[str, int]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}
