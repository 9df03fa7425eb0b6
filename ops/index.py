"""What a pattern keeps, as data that every kernel reads the same way.

Four forms, B batch, N query heads, n blocks:

    DistanceIndex   hit[B, N, distance] in global blocks, and columns: what a pattern returns for the whole sequence;
                    small, equal on all ranks, saved for the backward pass
    RowIndex        mask[B, N, own query block, key]: what a pattern returns that looks at every query; each rank has
                    its own
    BlockIndex      one ring step: for each query block the earlier key blocks that it keeps, and the same by key block
    ColumnIndex     single keys that every later query sees, unless a kept block already covers them

The methods here are plain torch and define what the forms mean; `ops/lists.py` makes the same lists by kernels on a
GPU. Nothing waits for the device: counts stay tensors and lists are as long as they can get.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

NO_COLUMN = torch.iinfo(torch.int32).max  # fills column lists past their count
COLUMN_TILE = 128  # columns that kernels treat at once, whatever the block is


def packed(flags: torch.Tensor) -> torch.Tensor:
    """int32 [..., W]: flags bool [..., 32 * W], bit c % 32 of word c // 32 stands for flag c."""
    weights = torch.ones(32, dtype=torch.int64, device=flags.device) << torch.arange(32, device=flags.device)
    words = (flags.unflatten(-1, (-1, 32)) * weights).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """bool [..., 32 * W] of int32 [..., W]: the inverse of `packed`."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1 == 1).flatten(-2)


class Lists(NamedTuple):
    """count int32 [B, N, rows]; index int32 [B, N, rows, width], ascending, undefined past count.

    Where B and N are both 1, the lists are those of every head.
    """

    count: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Lists":
        """The set entries along the last dim of a bool mask [B, N, rows, width].

        >>> Lists.of(torch.tensor([[[[1, 0, 0, 1], [0, 1, 0, 0]]]], dtype=torch.bool)).count.tolist()
        [[[2, 1]]]
        """
        width = mask.shape[-1]
        slot = torch.where(mask, mask.cumsum(-1) - 1, width)
        values = torch.arange(width, dtype=torch.int32, device=mask.device).expand(mask.shape)
        index = torch.zeros(*mask.shape[:-1], width + 1, dtype=torch.int32, device=mask.device)
        index = index.scatter_(-1, slot, values)[..., :width].contiguous()
        return cls(mask.sum(-1, dtype=torch.int32), index)

    def to_mask(self, width: int) -> torch.Tensor:
        """bool [B, N, rows, width]."""
        kept = torch.arange(self.index.shape[-1], device=self.index.device) < self.count[..., None]
        mask = torch.zeros(*self.count.shape, width + 1, dtype=torch.bool, device=self.index.device)
        return mask.scatter_(-1, torch.where(kept, self.index, width).long(), True)[..., :width]


@dataclass(frozen=True, kw_only=True)
class BlockIndex:
    """Kept blocks of one hop: local query blocks against the key blocks of some ranks.

    by_query: for each query block the key blocks that it keeps, all of them strictly earlier, hence seen whole.
    by_key: the same for each key block. Either is None where it was not asked for, both in what `causal` makes.
    diagonal: the first key blocks are the queries' own, and each query block also sees its own one, causally.
    dense: every earlier block is kept, so that a kernel may count blocks instead of reading lists.
    q_starts, k_starts: int32 [nq], [nk] global position of each block's first token.
    row_bits: int32 [B, N, Sq, ceil(chunks / 32)] or None: query row r sees key block j only if bit
    k_starts[j] // row_chunk of row r is set.

    Example: count=[0, 1, 2] index=[[-, -], [0, -], [0, 1]] with diagonal keeps (0,0) (1,0) (1,1) (2,0) (2,1) (2,2).
    """

    by_query: Lists | None
    by_key: Lists | None
    diagonal: bool
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    block: int
    dense: bool = False
    row_bits: torch.Tensor | None = None
    row_chunk: int = 0

    @classmethod
    def of(cls, mask: torch.Tensor, q_starts, k_starts, block: int, *, diagonal: bool) -> "BlockIndex":
        """Lists, both ways, of a bool mask [B, N, nq, nk] of blocks strictly earlier than their query block."""
        both = Lists.of(mask), Lists.of(mask.transpose(-1, -2))
        return cls(
            by_query=both[0], by_key=both[1], diagonal=diagonal, q_starts=q_starts, k_starts=k_starts, block=block
        )

    @classmethod
    def causal(cls, starts: torch.Tensor, block: int) -> "BlockIndex":
        """A rank's own keys, all of them, for backends that need no lists to know which."""
        lists = {"by_query": None, "by_key": None}
        return cls(**lists, diagonal=True, q_starts=starts, k_starts=starts, block=block, dense=True)


class ColumnTiles(NamedTuple):
    """Which columns each query block sees, in tiles of COLUMN_TILE columns, T of them.

    bits: int32 [B, N, nq, T * COLUMN_TILE / 32]; bit c % 32 of word c // 32 stands for column c.
    state: uint8 [B, N, nq, T]: 0 none of the tile's columns is seen, 1 some, 2 all.
    visible: int32 [B, N, nq]: how many leading columns lie in earlier blocks, covered ones included.
    """

    bits: torch.Tensor
    state: torch.Tensor
    visible: torch.Tensor

    def first_block(self, tile: int) -> torch.Tensor:
        """int32 [B, N, T * COLUMN_TILE / tile]: the first query block that lies after each tile's first column."""
        width = self.state.shape[-1] * COLUMN_TILE
        lead = torch.arange(0, width, tile, dtype=torch.int32, device=self.visible.device)
        lead = lead.expand(*self.visible.shape[:2], -1).contiguous()
        return torch.searchsorted(self.visible, lead, right=True, out_int32=True)


@dataclass(frozen=True, kw_only=True)
class ColumnIndex:
    """Kept columns: keys that every query of a later block sees.

    position: int32 [B, N, C] ascending global key positions, NO_COLUMN past count; count: int32 [B, N].
    hit: bool [B, N, n], the same table as in DistanceIndex: query block i sees the column at position c only
    where i > c // block and not hit[i - c // block], since a kept block already covers it otherwise.
    block: tokens per block.
    """

    position: torch.Tensor
    count: torch.Tensor
    hit: torch.Tensor
    block: int

    def tiles(self, q_starts: torch.Tensor) -> ColumnTiles:
        """What every query block sees, packed."""
        seen = torch.stack([self.seen(start) for start in q_starts], 2)
        seen = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % COLUMN_TILE))
        tiles = seen.unflatten(-1, (-1, COLUMN_TILE))
        state = tiles.any(-1).to(torch.uint8) + tiles.all(-1).to(torch.uint8)
        starts = (q_starts // self.block * self.block).expand(*self.position.shape[:2], -1).contiguous()
        return ColumnTiles(packed(seen), state, torch.searchsorted(self.position, starts, out_int32=True))

    def seen(self, q_start: int | torch.Tensor) -> torch.Tensor:
        """bool [B, N, C]: columns that the query block starting at `q_start` attends to."""
        distance = torch.div(q_start, self.block, rounding_mode="floor") - self.position // self.block
        covered = self.hit.gather(-1, distance.clamp(0, self.hit.shape[-1] - 1).long())
        return (distance > 0) & ~covered

    def seen_by_block(self) -> torch.Tensor:
        """float64 [B, N, n]: how many columns each global query block attends to.

        Of the columns up to block i those are covered whose distance is kept: a convolution of both tables.
        """
        blocks = self.hit.shape[-1]
        held = torch.zeros(*self.hit.shape[:2], blocks + 1, dtype=torch.float64, device=self.hit.device)
        place = (self.position // self.block).clamp_max(blocks).long()
        held = held.scatter_add_(-1, place, torch.ones_like(place, dtype=held.dtype))[..., :blocks]
        spectrum = torch.fft.rfft(held, 2 * blocks) * torch.fft.rfft(self.hit.double(), 2 * blocks)
        covered = torch.fft.irfft(spectrum, 2 * blocks)[..., :blocks].round()
        return held.cumsum(-1) - covered


@dataclass(frozen=True, kw_only=True)
class DistanceIndex:
    """What a pattern keeps of the whole causal matrix: all block diagonals b with hit[b], and columns.

    hit: bool [B, N, n], n global blocks; query block i keeps key block j <= i where hit[i - j]. hit[0] is always set.
    columns: ColumnIndex or None. capped: int32 scalar, number of heads whose column budget reached the cap.
    dense: every diagonal is kept; B and N of hit are then broadcast.

    Example, n = 4: hit=[1, 0, 1, 0] keeps (0,0) (1,1) (2,0) (2,2) (3,1) (3,3).
    """

    hit: torch.Tensor
    block: int
    columns: ColumnIndex | None = None
    capped: torch.Tensor | None = None
    dense: bool = False

    @property
    def device(self) -> torch.device:
        """Where the index lies."""
        return self.hit.device

    @property
    def head_count(self) -> int:
        """Query heads, over the batch."""
        return self.hit.shape[0] * self.hit.shape[1]

    @classmethod
    def keep_all(cls, batch: int, heads: int, blocks: int, block: int, device) -> "DistanceIndex":
        """Every causal block."""
        hit = torch.ones(1, 1, 1, dtype=torch.bool, device=device).expand(batch, heads, blocks)
        return cls(hit=hit, block=block, dense=True)

    def blocks(self, q_starts: torch.Tensor, k_starts: torch.Tensor, *, diagonal: bool) -> BlockIndex:
        """Lists of one ring step, for any layout: the distance of two blocks is all that counts."""
        distance = (q_starts[:, None] - k_starts[None, :]) // self.block
        hit = self.hit[:1, :1] if self.dense else self.hit
        mask = hit[..., distance.clamp_min(0).long()] & (distance > 0)
        return replace(BlockIndex.of(mask, q_starts, k_starts, self.block, diagonal=diagonal), dense=self.dense)

    def heads(self, chosen: slice) -> "DistanceIndex":
        """The index of some query heads."""
        return self._each(lambda x: x[:, chosen])

    def kept_pairs(self, q_starts: torch.Tensor, seq_len: int) -> torch.Tensor:
        """float64 scalar: query-key pairs that the given query blocks attend to, over all heads.

        The last block counts only its real tokens. Host use only: at logging time, never inside the operator.
        """
        rows = (seq_len - q_starts.double()).clamp(0, self.block)
        reach = self.hit.double().cumsum(-1)[..., q_starts.long() // self.block]  # blocks kept, the diagonal included
        pairs = ((reach - 1) * self.block * rows + rows * (rows + 1) / 2).sum()
        if self.columns is not None:
            pairs = pairs + (self.columns.seen_by_block()[..., q_starts.long() // self.block] * rows).sum()
        return pairs

    def density(self, seq_len: int) -> torch.Tensor:
        """float64 scalar in (0, 1]: kept pairs over causal pairs."""
        starts = torch.arange(0, seq_len, self.block, device=self.hit.device, dtype=torch.int32)
        return self.kept_pairs(starts, seq_len) / (self.head_count * seq_len * (seq_len + 1) / 2)

    def to(self, *args, **kwargs) -> "DistanceIndex":
        """The same index with its tensors moved."""
        return self._each(lambda x: x.to(*args, **kwargs))

    def _each(self, change) -> "DistanceIndex":
        columns = self.columns and replace(
            self.columns,
            position=change(self.columns.position),
            count=change(self.columns.count),
            hit=change(self.columns.hit),
        )
        return replace(self, hit=change(self.hit), columns=columns)


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """What a pattern keeps for the query blocks of one rank, each its own choice. The diagonal is always kept.

    mask: bool [B, N, nq, m]: query block i keeps those key blocks of span j, tokens j * span to (j + 1) * span of the
    sequence, that are earlier than itself. A byte an entry: 59 MB at 524288 tokens on 8 ranks with 28 heads, block and
    span 128.
    starts: int32 [nq] global position of each query block's first token.
    span: tokens of an entry, a multiple of block.
    row_bits: int32 [B, N, S_local, ceil(m / 32)] or None: row r sees the keys of span j only if its bit j is set; a row
    sees its own span.

    Example, starts=[0, 32] of a sequence in blocks of 16, span = block: mask=[[0, 0, 0], [1, 0, 0]] keeps global blocks
    (0,0) (2,0) (2,2).
    """

    mask: torch.Tensor
    starts: torch.Tensor
    block: int
    span: int
    row_bits: torch.Tensor | None = None
    columns: ClassVar[None] = None
    capped: ClassVar[None] = None
    dense: ClassVar[bool] = False

    @property
    def device(self) -> torch.device:
        """Where the index lies."""
        return self.mask.device

    @property
    def head_count(self) -> int:
        """Query heads, over the batch."""
        return self.mask.shape[0] * self.mask.shape[1]

    def blocks(self, q_starts: torch.Tensor, k_starts: torch.Tensor, *, diagonal: bool) -> BlockIndex:
        """Lists of one ring step. q_starts: those of the index."""
        assert len(q_starts) == self.mask.shape[2], "an index of other query blocks"
        mask = self.mask[..., k_starts.long() // self.span] & (k_starts < q_starts[:, None])
        lists = BlockIndex.of(mask, q_starts, k_starts, self.block, diagonal=diagonal)
        return replace(lists, row_bits=self.row_bits, row_chunk=self.span)

    def heads(self, chosen: slice) -> "RowIndex":
        """The index of some query heads."""
        return self._each(lambda x: x[:, chosen])

    def kept_pairs(self, q_starts: torch.Tensor, seq_len: int) -> torch.Tensor:
        """float64 scalar: query-key pairs that the index keeps, over all heads; q_starts are those of the index.

        The last block counts only its real tokens. Host use only: at logging time, never inside the operator.
        """
        rows = (seq_len - q_starts.double()).clamp(0, self.block)
        spans = torch.arange(self.mask.shape[-1], device=self.device) * self.span
        earlier = (q_starts[:, None] - spans).clamp(0, self.span)  # tokens of a span before the query block
        heads = (self.heads(slice(n, n + 1)) for n in range(self.mask.shape[1]))  # one at a time: counts take 8 bytes
        own = self.head_count * (rows * (rows + 1) / 2).sum()
        return own + sum((head.rows_that_see(rows) * earlier).sum() for head in heads)

    def density(self, seq_len: int) -> torch.Tensor:
        """float64 scalar in (0, 1]: kept pairs over causal pairs of this rank's own rows, 0 if all are padding.

        Ranks differ: the density of the sequence is the sum of their kept pairs over all causal pairs.
        """
        first, last = self.starts.double(), (self.starts.double() + self.block).clamp_max(seq_len)
        causal = torch.where(first < seq_len, last * (last + 1) - first * (first + 1), 0.0).sum() / 2
        return self.kept_pairs(self.starts, seq_len) / (self.head_count * causal).clamp_min(1)

    def to(self, *args, **kwargs) -> "RowIndex":
        """The same index with its tensors moved."""
        moved = self._each(lambda x: x.to(*args, **kwargs))
        return replace(moved, starts=self.starts.to(*args, **kwargs))

    def rows_that_see(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, N, nq, m]: how many of each query block's first `rows` [nq] tokens see each span."""
        if self.row_bits is None:
            return self.mask * rows[:, None]
        filling = self.mask.shape[2] * self.block - self.row_bits.shape[2]
        words = torch.nn.functional.pad(self.row_bits, (0, 0, 0, filling)).unflatten(2, (-1, self.block))
        real = (torch.arange(self.block, device=self.device) < rows[:, None])[..., None]
        counts = [((words >> bit & 1) * real).sum(3) for bit in range(32)]
        return self.mask * torch.stack(counts, -1).flatten(-2)[..., : self.mask.shape[-1]]

    def _each(self, change) -> "RowIndex":
        bits = None if self.row_bits is None else change(self.row_bits)
        return replace(self, mask=change(self.mask), row_bits=bits)


Index = DistanceIndex | RowIndex  # what a pattern builds
