"""Columns are gathered once, not circulated.

A head's vertical lines are a few thousand keys out of hundreds of thousands. Each rank writes its own rows into a
zeroed buffer and a sum over the ring makes it whole on every rank: exact, since every row has one owner, and no
rank waits to learn how many rows there are. Gradients go the same way back: summed over the ring, then added into
the owner's rows.
"""

import torch

from mtraining_nns.ops.index import COLUMN_TILE, ColumnIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Ring


class Columns:
    """The local rows of a ColumnIndex under a layout, C rounded up to whole tiles.

    row: int64 [B, N, C] local row of each column, 0 where another rank owns it; mine: bool [B, N, C].
    """

    def __init__(self, columns: ColumnIndex, layout: Layout, ring: Ring):
        filled = torch.nn.functional.pad(columns.position, (0, -columns.position.shape[-1] % COLUMN_TILE))
        owner, row = layout.locate(filled.long())
        valid = torch.arange(row.shape[-1], device=row.device) < columns.count[..., None]
        self.mine = valid & (owner == ring.rank)
        self.row = torch.where(self.mine, row, 0)
        self.ring = ring

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[2, B, N, C, D]: keys and values of every column, zero past the count, equal on all ranks."""
        kv = torch.stack([self._rows(k), self._rows(v)])
        return self.ring.sum(kv * self.mine[..., None].to(kv.dtype))

    def scatter_add(self, grads: torch.Tensor, dkv: torch.Tensor) -> None:
        """Add the ring's sum of fp32 [2, B, N, C, D] into the owners' rows of dkv [2, B, S, H, D]."""
        grads = self.ring.sum(grads)
        if dkv.is_cuda and dkv.shape[-1].bit_count() == 1:
            from mtraining_nns.ops.kernels.triton_columns import add_rows

            add_rows(grads, self.row, self.mine, dkv)
            return
        grads = grads * self.mine[..., None]
        group = self.row.shape[1] // dkv.shape[3]
        # heads of one kv group share tokens: one head of each group at a time, so no row is added to twice at once
        for member in range(group):
            row = self.row[:, member::group].transpose(1, 2)[..., None].expand(-1, -1, -1, dkv.shape[-1])
            for grad, total in zip(grads, dkv, strict=True):
                total.scatter_add_(1, row, grad[:, member::group].transpose(1, 2))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
        head = torch.arange(self.row.shape[1], device=x.device) // (self.row.shape[1] // x.shape[2])
        return x[batch, self.row, head[:, None]]
