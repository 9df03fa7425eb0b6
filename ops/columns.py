"""Columns are gathered once, not circulated.

A head's vertical lines are a few thousand keys out of hundreds of thousands. Each rank writes its own rows into a
zeroed buffer and a sum over the ring makes it whole on every rank: exact, since every row has one owner, and no
rank waits to learn how many rows there are. Gradients go the same way back: summed over the ring, then added into
the owner's rows.
"""

from functools import cached_property

import torch

from mtraining_nns.ops.index import COLUMN_TILE, NO_COLUMN, ColumnIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Pending, Ring


class Columns:
    """The columns of an index under a layout, C rounded up to whole tiles.

    position: int32 [B, N, C], NO_COLUMN past the count; own: int32 [n], where this rank keeps each global block or -1.
    """

    def __init__(self, columns: ColumnIndex, layout: Layout, ring: Ring):
        filling = -columns.position.shape[-1] % COLUMN_TILE
        self.position = torch.nn.functional.pad(columns.position, (0, filling), value=NO_COLUMN)
        self.own = layout.own_blocks(ring.rank, columns.position.device)
        self.block, self.ring = columns.block, ring

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> Pending:
        """[2, B, N, C, D], under way: keys and values of every column, zero past the count, equal on all ranks."""
        if _has_kernels(k):
            from mtraining_nns.ops.kernels.triton_columns import gather_rows

            return self.ring.start_sum(gather_rows(self.position, self.own, self.block, k, v))
        row, mine = self._local
        batch = torch.arange(k.shape[0], device=k.device)[:, None, None]
        head = torch.arange(row.shape[1], device=k.device) // (row.shape[1] // k.shape[2])
        kv = torch.stack([x[batch, row, head[:, None]] for x in (k, v)])
        return self.ring.start_sum(kv * mine[..., None].to(kv.dtype))

    def start_sum(self, grads: torch.Tensor) -> Pending:
        """fp32 [2, B, N, C, D], under way: the ring's sum of [2, B, N, C, D]."""
        return self.ring.start_sum(grads.float().contiguous())

    def add(self, grads: torch.Tensor, dkv: torch.Tensor) -> None:
        """Add fp32 [2, B, N, C, D] into the owners' rows of dkv [2, B, S, H, D]."""
        if _has_kernels(dkv):
            from mtraining_nns.ops.kernels.triton_columns import add_rows

            add_rows(grads, self.position, self.own, self.block, dkv)
            return
        row, mine = self._local
        grads = grads * mine[..., None]
        group = row.shape[1] // dkv.shape[3]
        # heads of one kv group share tokens: one head of each group at a time, so no row is added to twice at once
        for member in range(group):
            rows = row[:, member::group].transpose(1, 2)[..., None].expand(-1, -1, -1, dkv.shape[-1])
            for grad, total in zip(grads, dkv, strict=True):
                total.scatter_add_(1, rows, grad[:, member::group].transpose(1, 2))

    @cached_property
    def _local(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [B, N, C] local row of each column, bool: this rank owns it); row 0 where it does not."""
        block = (self.position // self.block).long()
        place = torch.where(self.position == NO_COLUMN, -1, self.own[block.clamp_max(len(self.own) - 1)])
        mine = place >= 0
        return torch.where(mine, place.long() * self.block + self.position % self.block, 0), mine


def _has_kernels(x: torch.Tensor) -> bool:
    """Kernels do head dims that are powers of two."""
    return x.is_cuda and x.shape[-1].bit_count() == 1
