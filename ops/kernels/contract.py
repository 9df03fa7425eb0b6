"""What goes into a kernel backend and what comes out. Not in the package file, where backends' names hide libraries."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtraining_nns.ops.index import BlockIndex, ColumnTiles


class GatheredColumns(NamedTuple):
    """Single keys and values of every query head, kv [2, B, N, C, D], zero past the count, C in whole tiles."""

    kv: Tensor
    tiles: ColumnTiles

    def heads(self, chosen: slice) -> "GatheredColumns":
        """The columns of some query heads."""
        return GatheredColumns(self.kv[:, :, chosen], ColumnTiles(*(x[:, chosen] for x in self.tiles)))


class Keys(NamedTuple):
    """What the queries attend to at once: kept blocks of one rank's keys and, at one ring step, the columns."""

    k: Tensor
    v: Tensor
    blocks: BlockIndex
    columns: GatheredColumns | None = None


@dataclass(frozen=True)
class Tape:
    """What the backward pass needs of the whole attention, not of one step.

    dout, out [B, S, N, D]; lse fp32 [B, N, S]; scale of the scores.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    whole: "Tape | None" = None  # of all heads, if this one is of some
    chosen: slice | None = None

    @cached_property
    def delta(self) -> Tensor:
        """fp32 [B, N, S]: rowsum(dout * out), the derivative of the softmax's normaliser."""
        if self.whole is not None:
            return self.whole.delta[:, self.chosen].contiguous()
        if self.out.is_cuda and self.out.shape[-1].bit_count() == 1:
            from mtraining_nns.ops.kernels.triton_rows import row_dot

            return row_dot(self.dout.contiguous(), self.out.contiguous())
        return (self.dout.float() * self.out.float()).sum(-1).transpose(1, 2).contiguous()

    def heads(self, chosen: slice) -> "Tape":
        """The tape of some query heads."""
        if chosen == slice(0, self.lse.shape[1]):
            return self
        lse = self.lse[:, chosen].contiguous()
        return Tape(self.dout[:, :, chosen], self.out[:, :, chosen], lse, self.scale, self, chosen)


class Grads(NamedTuple):
    """dq [B, Sq, N, D] or the carry of the next call; dkv [2, B, Sk, H, D]; columns [2, B, N, C, D] or None."""

    dq: Any
    dkv: Tensor
    columns: Tensor | None


def joined(carry: Tensor | None, dq: Tensor, dtype: torch.dtype | None) -> Tensor:
    """carry + dq in fp32, then in the wanted dtype, fp32 by default."""
    total = dq if carry is None else carry + dq
    return total.to(dtype or torch.float32)


def list_bytes(q: Tensor, k: Tensor, block: int) -> int:
    """Most bytes of both block lists of one key head and its query heads, int32 entries."""
    pairs = -(-q.shape[1] // block) * -(-k.shape[1] // block)
    return 2 * 4 * q.shape[0] * (q.shape[2] // k.shape[2]) * pairs
