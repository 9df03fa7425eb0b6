"""The lists of one ring step, made where the index lies: by kernels on a GPU, in plain torch on a CPU.

Both give the same lists; `ops/index.py` says what they mean.
"""

import torch

from mtraining_nns.ops.index import BlockIndex, ColumnIndex, ColumnTiles, DistanceIndex


def block_lists(index: DistanceIndex, q_starts, k_starts, *, diagonal: bool, both: bool) -> BlockIndex:
    """BlockIndex of query blocks against key blocks; both: by key block, too, as backward passes need them.

    q_starts, k_starts: int32 [nq], [nk] global position of each block's first token. diagonal: the two are the same.
    """
    if not index.hit.is_cuda:
        return index.blocks(q_starts, k_starts, diagonal=diagonal)
    from mtraining_nns.ops.kernels.triton_lists import distance_lists

    hit = index.hit[:1, :1] if index.dense else index.hit
    by_query = distance_lists(hit, q_starts, k_starts, index.block, 1)
    by_key = distance_lists(hit, k_starts, q_starts, index.block, -1) if both else None
    return BlockIndex(
        by_query=by_query,
        by_key=by_key,
        diagonal=diagonal,
        q_starts=q_starts,
        k_starts=k_starts,
        block=index.block,
        dense=index.dense,
    )


def column_tiles(columns: ColumnIndex, q_starts: torch.Tensor) -> ColumnTiles:
    """Which columns each query block sees, packed."""
    if not columns.position.is_cuda:
        return columns.tiles(q_starts)
    from mtraining_nns.ops.kernels import triton_lists

    return triton_lists.column_tiles(columns, q_starts)
