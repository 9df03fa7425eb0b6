"""The lists of one ring step, made where the index lies: by kernels on a GPU, in plain torch on a CPU.

Both give the same lists; `ops/index.py` says what they mean.
"""

import torch

from mtraining_nns.ops.index import BlockIndex, ColumnIndex, ColumnTiles, Index, RowIndex


def block_lists(index: Index, q_starts, k_starts, *, diagonal: bool, by_query=True, by_key=True) -> BlockIndex:
    """BlockIndex of query blocks against key blocks, with the lists that are asked for.

    q_starts, k_starts: int32 [nq], [nk] global position of each block's first token. diagonal: the first key blocks
    are the query blocks.
    """
    if index.device.type != "cuda":
        return index.blocks(q_starts, k_starts, diagonal=diagonal)
    from mtraining_nns.ops.kernels import triton_lists

    if isinstance(index, RowIndex):
        make, table, unit = triton_lists.mask_lists, index.mask, index.span
        bits = {"row_bits": index.row_bits, "row_chunk": index.span}
    else:
        make, table, unit = triton_lists.distance_lists, index.hit[:1, :1] if index.dense else index.hit, index.block
        bits = {}
    return BlockIndex(
        by_query=make(table, q_starts, k_starts, unit, 1) if by_query else None,
        by_key=make(table, k_starts, q_starts, unit, -1) if by_key else None,
        diagonal=diagonal,
        q_starts=q_starts,
        k_starts=k_starts,
        block=index.block,
        dense=index.dense,
        **bits,
    )


def column_tiles(columns: ColumnIndex, q_starts: torch.Tensor) -> ColumnTiles:
    """Which columns each query block sees, packed."""
    if not columns.position.is_cuda:
        return columns.tiles(q_starts)
    from mtraining_nns.ops.kernels import triton_lists

    return triton_lists.column_tiles(columns, q_starts)
