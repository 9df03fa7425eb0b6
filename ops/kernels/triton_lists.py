"""The lists of an index by kernels: what `ops/index.py` defines in plain torch, without tables of rows x columns.

    distance_lists   a program a row: walks the other side's blocks, looks up their distance, packs the kept ones
    mask_lists       the same, looks up the pair of blocks
    column_tiles     a program a tile of columns and QUERIES query blocks: a bit a column and block, a state a block

Nothing waits for the device: lists are as long as they can get, and only their first `count` entries are written.
On CPU tensors this runs only under TRITON_INTERPRET=1, for tests.

Shapes: hit [B, N, n]; mask [B, N, nq, m]; lists [B, N, rows, width]; position [B, N, C], T tiles of columns; nq query
blocks. Programs are counted in 32 bits, offsets into lists in 64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.index import COLUMN_TILE, NO_COLUMN, ColumnIndex, ColumnTiles, Lists

CHUNK = 512  # entries that a program of one list looks at together
WARPS = 1  # of such a program: packing within a warp needs no barrier
QUERIES = 128  # query blocks of a program of column_tiles: a thread each, so that it packs its words alone
TILE = tl.constexpr(COLUMN_TILE)
NOWHERE = tl.constexpr(NO_COLUMN)


def distance_lists(hit: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor, block: int, sign: int) -> Lists:
    """For each row the cols c with d = sign * (rows[r] // block - cols[c] // block) > 0 and hit[..., d].

    hit: bool [B, N, n]; where it is broadcast over heads, so is the result: [1, 1, ...]. rows, cols: int32 starts of
    blocks, fewer than n blocks apart. sign: 1 lists earlier blocks, -1 later ones.

    Example: hit=[1, 0, 1] rows=cols=[0, 16, 32] block=16 gives count=[0, 0, 1] index=[-, -, [0]] for sign=1 and
    count=[1, 0, 0] index=[[2], -, -] for sign=-1.
    """
    if all(size == 1 or stride == 0 for size, stride in zip(hit.shape[:2], hit.stride())):
        hit = hit[:1, :1]
    return _lists(hit, Steps(0, 0, sign, -sign), rows, cols, block, sign)


def mask_lists(mask: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor, span: int, sign: int) -> Lists:
    """For each query block the earlier key blocks that it keeps (sign 1), or for each key block the later query blocks.

    mask: bool [B, N, nq, m]: whether query block i keeps the blocks of span j. rows, cols: int32 starts of blocks: of
    queries and keys for sign 1, of keys and queries for sign -1.

    Example: mask=[[1, 1], [1, 0]] rows=[0, 32] cols=[0, 16] span=16 gives count=[0, 1] index=[-, [0]] for sign=1 and,
    rows and cols exchanged, count=[1, 0] index=[[1], -] for sign=-1.
    """
    m = mask.shape[-1]
    return _lists(mask, Steps(m, 0, 0, 1) if sign > 0 else Steps(0, m, 1, 0), rows, cols, span, sign)


class Steps(NamedTuple):
    """Where in a head's table the entry of a row and a col lies: the sum of each number times its step.

    row, col: the blocks' numbers. row_unit, col_unit: their starts in units of tokens.
    """

    row: int
    col: int
    row_unit: int
    col_unit: int


def _lists(table, steps: Steps, rows, cols, unit: int, sign: int) -> Lists:
    lists = empty_lists(table.shape[:2], len(rows), len(cols), table.device)
    table_rows[(lists.count.numel(),)](
        table.contiguous().view(torch.uint8), rows, cols, *lists, *steps, table[0, 0].numel(), len(rows), len(cols),
        UNIT=unit, SIGN=sign, CHUNK=chunk(len(cols)), num_warps=WARPS,
    )  # fmt: skip
    return lists


def column_tiles(columns: ColumnIndex, q_starts: torch.Tensor) -> ColumnTiles:
    """Which columns each query block sees. q_starts: int32 [nq] global position of each block's first token."""
    heads, width, blocks = columns.position.shape[:2], columns.position.shape[-1], len(q_starts)
    tiles = triton.cdiv(width, COLUMN_TILE)
    bits = torch.empty(*heads, blocks, tiles * (COLUMN_TILE // 32), dtype=torch.int32, device=q_starts.device)
    state = torch.empty(*heads, blocks, tiles, dtype=torch.uint8, device=q_starts.device)
    visible = torch.empty(*heads, blocks, dtype=torch.int32, device=q_starts.device)
    tile_columns[(heads.numel() * triton.cdiv(blocks, QUERIES) * tiles,)](
        columns.position.contiguous(), columns.hit.contiguous().view(torch.uint8), q_starts, bits, state, visible,
        columns.hit.shape[-1], width, blocks, tiles, BLOCK=columns.block, QUERIES=QUERIES, num_warps=QUERIES // 32,
    )  # fmt: skip
    return ColumnTiles(bits, state, visible)


def empty_lists(heads: torch.Size, rows: int, width: int, device) -> Lists:
    count = torch.empty(*heads, rows, dtype=torch.int32, device=device)
    return Lists(count, torch.empty(*heads, rows, width, dtype=torch.int32, device=device))


def chunk(width: int) -> int:
    """Entries that a walk over `width` of them looks at together."""
    return min(CHUNK, triton.next_power_of_2(width))


@triton.jit
def append(INDEX, count, values, keep):
    """Write the kept values behind the `count` entries of a list; returns the new count."""
    slots = count + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(INDEX + slots, values, mask=keep)
    return count + tl.sum(keep.to(tl.int32), 0)


@triton.jit
def table_rows(
    TABLE, ROWS, COLS, COUNT, INDEX,
    row_step, col_step, row_unit_step, col_unit_step, size, rows, width,
    UNIT: tl.constexpr, SIGN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (head, row): the cols on the side SIGN of the row whose entry is set; `Steps` says where entries lie."""
    program = tl.program_id(0)
    row = program % rows
    start = tl.load(ROWS + row)
    TABLE += (program // rows).to(tl.int64) * size + row.to(tl.int64) * row_step + start // UNIT * row_unit_step
    INDEX += program.to(tl.int64) * width
    count = 0
    for first in range(0, width, CHUNK):
        cols = first + tl.arange(0, CHUNK)
        starts = tl.load(COLS + cols, mask=cols < width, other=0)
        on_side = (cols < width) & (SIGN * (start - starts) > 0)
        if tl.max(on_side.to(tl.int32), 0) > 0:  # half of all chunks have none
            entries = cols.to(tl.int64) * col_step + starts // UNIT * col_unit_step
            kept = tl.load(TABLE + entries, mask=on_side, other=0)
            count = append(INDEX, count, cols, kept != 0)
    tl.store(COUNT + program, count)


@triton.jit
def tile_columns(
    POSITION, HIT, Q_STARTS, BITS, STATE, VISIBLE,
    n, C, nq, tiles,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (head, query blocks, tile). Query blocks lie along the last dim, hence along the threads of a warp.

    There neighbours look up neighbouring distances, and the 32 columns of a word meet in one thread.
    """
    tile, program = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    head = (program // tl.cdiv(nq, QUERIES)).to(tl.int64)
    first = program % tl.cdiv(nq, QUERIES) * QUERIES
    i = first + tl.arange(0, QUERIES)
    own = tl.load(Q_STARTS + i, mask=i < nq, other=0) // BLOCK
    last = tl.load(Q_STARTS + tl.minimum(first + QUERIES, nq) - 1) // BLOCK
    POSITION += head * C
    HIT += head * n
    BITS += (head * nq + i) * (tiles * (TILE // 32))
    bit = tl.arange(0, 32)
    any_seen, all_seen = tl.zeros([QUERIES], tl.int1), tl.full([QUERIES], 1, tl.int1)
    earlier = tl.zeros([QUERIES], tl.int32)
    for part in range(tile * (TILE // 32), (tile + 1) * (TILE // 32)):
        word = tl.zeros([QUERIES], tl.int32)
        lead = tl.load(POSITION + part * 32, mask=part * 32 < C, other=NOWHERE)
        if lead // BLOCK < last:  # else no query block lies after the word's first column
            column = part * 32 + bit
            position = tl.load(POSITION + column, mask=column < C, other=NOWHERE)
            distance = own[None, :] - (position // BLOCK)[:, None]
            covered = tl.load(HIT + distance, mask=distance > 0, other=1).to(tl.int32)
            word = ~tl.sum(covered << bit[:, None], 0)
            earlier += tl.sum((distance > 0).to(tl.int32), 0)
        any_seen |= word != 0
        all_seen &= word == -1
        tl.store(BITS + part, word, mask=i < nq)
    tl.store(STATE + (head * nq + i) * tiles + tile, any_seen.to(tl.uint8) + all_seen.to(tl.uint8), mask=i < nq)
    # columns ascend, so the earlier ones end in one tile: where the one before is whole, this one not, or none follows
    before = tl.load(POSITION + tile * TILE - 1, mask=tile > 0, other=-BLOCK)
    whole = tl.where(tile == tiles - 1, TILE + 1, TILE)
    ends = (before // BLOCK < own) & (earlier < whole) & (i < nq)
    tl.store(VISIBLE + head * nq + i, tile * TILE + earlier, mask=ends)
