"""What a pattern keeps, as data that every kernel reads the same way.

Three forms, B batch, N query heads, n blocks:

    DistanceIndex   hit[B, N, distance] in global blocks, and columns: what a pattern returns for the whole sequence;
                    small, equal on all ranks, saved for the backward pass
    BlockIndex      for each query block of one ring step a count and an ascending list of key blocks
    ColumnIndex     single keys that every later query sees, unless a kept block already covers them

Nothing here waits for the device: counts stay tensors and lists are as long as they can get.
"""

from dataclasses import dataclass, replace

import torch

NO_COLUMN = torch.iinfo(torch.int32).max  # fills column lists past their count


@dataclass(frozen=True, kw_only=True)
class BlockIndex:
    """Kept blocks of one ring step: local query blocks against local key blocks of one source rank.

    count: int32 [B, N, nq]; index: int32 [B, N, nq, nk], ascending, valid up to count.
    q_starts, k_starts: int32 [nq], [nk] global position of each block's first token; a key is seen if it is not later
    than the query, so only a block on the diagonal needs a mask. No listed block lies above the diagonal.
    row_bits: int32 [B, N, Sq, ceil(chunks / 32)] or None: query row r sees key block j only if bit
    k_starts[j] // row_chunk of row r is set.

    Example: count=[2, 1] index=[[0, 3], [1, -]] keeps blocks (0,0) (0,3) (1,1).
    """

    count: torch.Tensor
    index: torch.Tensor
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    block: int
    row_bits: torch.Tensor | None = None
    row_chunk: int = 0

    @classmethod
    def from_mask(cls, mask: torch.Tensor, q_starts: torch.Tensor, k_starts: torch.Tensor, block: int) -> "BlockIndex":
        """Lists of a bool mask [B, N, nq, nk]."""
        count, index = _lists(mask)
        return cls(count=count, index=index, q_starts=q_starts, k_starts=k_starts, block=block)

    def to_mask(self) -> torch.Tensor:
        """bool [B, N, nq, nk]; blocks above the diagonal stay as listed."""
        kept = torch.arange(self.index.shape[-1], device=self.index.device) < self.count[..., None]
        width = len(self.k_starts)
        mask = torch.zeros(*self.index.shape[:3], width + 1, dtype=torch.bool, device=self.index.device)
        return mask.scatter_(-1, torch.where(kept, self.index, width).long(), True)[..., :width]

    def transpose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(count int32 [B, N, nk], index int32 [B, N, nk, nq]): for each key block the query blocks that keep it."""
        return _lists(self.to_mask().transpose(-1, -2))


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

    def visible(self, q_starts: torch.Tensor) -> torch.Tensor:
        """int32 [B, N, nq]: how many leading columns lie before each query block."""
        starts = q_starts.expand(*self.position.shape[:2], -1).contiguous()
        return torch.searchsorted(self.position, starts, out_int32=True)

    def first_block(self, q_starts: torch.Tensor, tile: int) -> torch.Tensor:
        """int32 [B, N, C / tile]: the first query block that lies after each tile's first column."""
        lead = self.position[..., ::tile].contiguous()
        return torch.searchsorted(q_starts.expand(*lead.shape[:2], -1).contiguous(), lead, right=True, out_int32=True)

    def seen(self, q_start: int | torch.Tensor) -> torch.Tensor:
        """bool [B, N, C]: columns that the query block starting at `q_start` attends to."""
        distance = torch.div(q_start, self.block, rounding_mode="floor") - self.position // self.block
        covered = self.hit.gather(-1, distance.clamp(0, self.hit.shape[-1] - 1).long())
        return (distance > 0) & ~covered


@dataclass(frozen=True, kw_only=True)
class DistanceIndex:
    """What a pattern keeps of the whole causal matrix: all block diagonals b with hit[b], and columns.

    hit: bool [B, N, n], n global blocks; query block i keeps key block j <= i where hit[i - j]. hit[0] is always set.
    columns: ColumnIndex or None. capped: int32 scalar, number of heads whose column budget reached the cap.

    Example, n = 4: hit=[1, 0, 1, 0] keeps (0,0) (1,1) (2,0) (2,2) (3,1) (3,3).
    """

    hit: torch.Tensor
    block: int
    columns: ColumnIndex | None = None
    capped: torch.Tensor | None = None

    @classmethod
    def dense(cls, batch: int, heads: int, blocks: int, block: int, device) -> "DistanceIndex":
        """Every causal block."""
        hit = torch.ones(1, 1, 1, dtype=torch.bool, device=device).expand(batch, heads, blocks)
        return cls(hit=hit, block=block)

    def blocks(self, q_starts: torch.Tensor, k_starts: torch.Tensor) -> BlockIndex:
        """Lists of one ring step, for any layout: the distance of two blocks is all that counts."""
        distance = (q_starts[:, None] - k_starts[None, :]) // self.block
        mask = self.hit[..., distance.clamp_min(0).long()] & (distance >= 0)
        return BlockIndex.from_mask(mask, q_starts, k_starts, self.block)

    def kept_pairs(self, q_starts: torch.Tensor, seq_len: int) -> torch.Tensor:
        """float64 scalar: query-key pairs that the given query blocks attend to, over all heads.

        The last block counts only its real tokens. Host use only: at logging time, never inside the operator.
        """
        rows = (seq_len - q_starts.double()).clamp(0, self.block)
        reach = self.hit.double().cumsum(-1)[..., q_starts.long() // self.block]  # blocks kept, the diagonal included
        pairs = ((reach - 1) * self.block * rows + rows * (rows + 1) / 2).sum()
        if self.columns is not None:
            seen = [self.columns.seen(start).sum() for start in q_starts]
            pairs = pairs + (torch.stack(seen).double() * rows).sum()
        return pairs

    def density(self, seq_len: int) -> torch.Tensor:
        """float64 scalar in (0, 1]: kept pairs over causal pairs."""
        starts = torch.arange(0, seq_len, self.block, device=self.hit.device, dtype=torch.int32)
        heads = self.hit.shape[0] * self.hit.shape[1]
        return self.kept_pairs(starts, seq_len) / (heads * seq_len * (seq_len + 1) / 2)

    def to(self, *args, **kwargs) -> "DistanceIndex":
        """The same index with its tensors moved."""
        columns = self.columns and replace(
            self.columns,
            position=self.columns.position.to(*args, **kwargs),
            count=self.columns.count.to(*args, **kwargs),
            hit=self.columns.hit.to(*args, **kwargs),
        )
        return replace(self, hit=self.hit.to(*args, **kwargs), columns=columns)


def _lists(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """count and ascending list of the set entries along the last dim, without asking the device for a length."""
    width = mask.shape[-1]
    slot = torch.where(mask, mask.cumsum(-1) - 1, width)
    values = torch.arange(width, dtype=torch.int32, device=mask.device).expand(mask.shape)
    index = torch.zeros(*mask.shape[:-1], width + 1, dtype=torch.int32, device=mask.device)
    index = index.scatter_(-1, slot, values)[..., :width].contiguous()
    return mask.sum(-1, dtype=torch.int32), index
