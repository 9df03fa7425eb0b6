"""Block lists for FlashAttention-4, where gathered columns lie in front of the keys as further key blocks.

    extended keys of a kv head, G query heads, T column tiles, R copies:

        | member 0: tile 0 copies 0 .. R-1, tile 1 .., tile T-1 ..  | .. | member G-1 | key block 0 .. nk-1 |
          0         (m * T + t) * R + r                                                 G * T * R + j

Query head n is member m = n % G of its group and sees no other member's columns. A column tile's queries are shared
among its R copies, query block i using copy i % R, so that the backward pass has R programs for each; the forward
pass needs one. Programs run about in the order of blocks: those of one member read the same queries and add to the same
dQ while both are in the cache. The backward pass may take F heads of a group as one that has their query blocks one
after another, block i of the f-th being f * nq + i.

The mask function is applied to blocks of `mask` alone: column tiles of which a query block sees some columns, and the
diagonal. Blocks of `full` are seen whole.

Nothing waits for the device; only the first `count` entries of a list are written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.index import BlockIndex, ColumnTiles, Lists
from mtraining_nns.ops.kernels.triton_lists import WARPS, append, chunk, empty_lists


class MaskFull(NamedTuple):
    """Lists of blocks that need the mask function, and of blocks that are seen whole; no block is in both."""

    mask: Lists
    full: Lists


def by_query(blocks: BlockIndex, tiles: ColumnTiles | None, group: int) -> MaskFull:
    """For each query block its extended key blocks, one copy of every tile; group: query heads a kv head.

    Without columns the result is broadcast over heads where the lists of `blocks` are.
    """
    if tiles is None:
        return MaskFull(_diagonal(blocks, blocks.by_query), blocks.by_query)
    heads, (nq, count), nk = tiles.state.shape[:2], tiles.state.shape[2:], len(blocks.k_starts)
    mask = empty_lists(heads, nq, count + 1, tiles.state.device)
    full = empty_lists(heads, nq, count + nk, tiles.state.device)
    query_rows[(mask.count.numel(),)](
        tiles.state, *blocks.by_query, *mask, *full, nq, nk, count, group,
        DIAGONAL=int(blocks.diagonal), SHARED=shared(blocks.by_query), TILES=triton.next_power_of_2(count),
        CHUNK=chunk(nk), num_warps=WARPS,
    )  # fmt: skip
    return MaskFull(mask, full)


def by_key(blocks: BlockIndex, tiles: ColumnTiles | None, group: int, copies: int, fold: int = 1) -> MaskFull:
    """For each extended key block its query blocks, of [B, N / fold] heads; group: query heads a kv head.

    Without columns, and with fold 1, the result is broadcast over heads where the lists of `blocks` are.
    """
    lists, nq, nk, device = blocks.by_key, len(blocks.q_starts), len(blocks.k_starts), blocks.q_starts.device
    assert lists is not None, "lists by key are for backward passes: build them with both=True"
    if tiles is None and fold == 1:
        return MaskFull(_diagonal(blocks, lists), lists)
    heads, count = (lists.count.shape[:2], 0) if tiles is None else (tiles.state.shape[:2], tiles.state.shape[3])
    heads, rows, width = (heads[0], heads[1] // fold), group * count * copies + nk, max(triton.cdiv(nq, copies), fold)
    mask, full = empty_lists(heads, rows, width, device), empty_lists(heads, rows, fold * nq, device)
    key_rows[(mask.count.numel(),)](
        lists.count if tiles is None else tiles.state, *lists, *mask, *full,
        nq, nk, nq * blocks.diagonal, count, group, width,
        COPIES=copies, FOLD=fold, SHARED=shared(lists), CHUNK=chunk(nq), num_warps=WARPS,
    )  # fmt: skip
    return MaskFull(mask, full)


def _diagonal(blocks: BlockIndex, like: Lists) -> Lists:
    """Each row's own number where it is one of the queries' own blocks; heads and rows as in `like`."""
    rows = torch.arange(like.count.shape[-1], dtype=torch.int32, device=like.count.device)
    own = (rows < len(blocks.q_starts) * blocks.diagonal).int()
    count, index = (x.expand(like.count.shape).contiguous() for x in (own, rows))
    return Lists(count, index[..., None])


def shared(lists: Lists) -> bool:
    """Whether all heads read the first list."""
    return lists.count.shape[:2].numel() == 1


@triton.jit
def copy_list(TARGET, INDEX, count, offset, CHUNK: tl.constexpr):
    """TARGET[:count] = INDEX[:count] + offset."""
    for first in range(0, count, CHUNK):
        entries = first + tl.arange(0, CHUNK)
        listed = tl.load(INDEX + entries, mask=entries < count, other=0)
        tl.store(TARGET + entries, listed + offset, mask=entries < count)


@triton.jit
def query_rows(
    STATE, COUNT, INDEX, MASK_COUNT, MASK_INDEX, FULL_COUNT, FULL_INDEX,
    nq, nk, tiles, group,
    DIAGONAL: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (head, query block)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(0) % nq
    member = tl.program_id(0) // nq % group
    MASK_INDEX += row * (tiles + 1)
    FULL_INDEX += row * (tiles + nk)
    tile = tl.arange(0, TILES)
    state = tl.load(STATE + row * tiles + tile, mask=tile < tiles, other=0)
    masked = append(MASK_INDEX, 0, member * tiles + tile, state == 1)
    if DIAGONAL:
        tl.store(MASK_INDEX + masked, group * tiles + i)
    tl.store(MASK_COUNT + row, masked + DIAGONAL)
    full = append(FULL_INDEX, 0, member * tiles + tile, state == 2)
    listed = (i if SHARED else row).to(tl.int64)
    count = tl.load(COUNT + listed)
    copy_list(FULL_INDEX + full, INDEX + listed * nk, count, group * tiles, CHUNK)
    tl.store(FULL_COUNT + row, full + count)


@triton.jit
def key_rows(
    STATE, COUNT, INDEX, MASK_COUNT, MASK_INDEX, FULL_COUNT, FULL_INDEX,
    nq, nk, own, tiles, group, width,
    COPIES: tl.constexpr, FOLD: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (FOLD heads, extended key block); own: how many key blocks are the queries' own."""
    columns = group * tiles * COPIES
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(0) % (columns + nk)
    head = tl.program_id(0) // (columns + nk) * FOLD  # the first one
    MASK_INDEX += row * width
    FULL_INDEX += row * FOLD * nq
    masked, full = 0, 0
    if block < columns:
        place = block // (COPIES * tiles) - head % group  # of the column's head among these
        here = (place >= 0) & (place < FOLD)
        STATE += (head + place).to(tl.int64) * nq * tiles + block // COPIES % tiles
        for first in range(tl.where(here, block % COPIES, nq), nq, CHUNK * COPIES):
            i = first + tl.arange(0, CHUNK) * COPIES
            state = tl.load(STATE + i * tiles, mask=i < nq, other=0)
            masked = append(MASK_INDEX, masked, place * nq + i, state == 1)
            full = append(FULL_INDEX, full, place * nq + i, state == 2)
    else:
        j = block - columns
        for f in range(0, FOLD):
            if j < own:
                tl.store(MASK_INDEX + f, f * nq + j)
            listed = (j if SHARED else (head + f).to(tl.int64) * nk + j).to(tl.int64)
            count = tl.load(COUNT + listed)
            copy_list(FULL_INDEX + full, INDEX + listed * nq, count, f * nq, CHUNK)
            full += count
        masked = tl.where(j < own, FOLD, 0)
    tl.store(MASK_COUNT + row, masked)
    tl.store(FULL_COUNT + row, full)
