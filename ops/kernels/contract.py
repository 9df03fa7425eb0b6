"""What goes into a kernel backend and what comes out. Not in the package file, where backends' names hide libraries."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mtraining_nns.ops.index import BlockIndex, ColumnTiles


class GatheredColumns(NamedTuple):
    """Single keys and values of every query head, kv [2, B, N, C, D], zero past the count; who sees them: tiles."""

    kv: Tensor
    tiles: ColumnTiles


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

    @cached_property
    def delta(self) -> Tensor:
        """fp32 [B, N, S]: rowsum(dout * out), the derivative of the softmax's normaliser."""
        if self.out.is_cuda and self.out.shape[-1].bit_count() == 1:
            from mtraining_nns.ops.kernels.triton_blocks import row_dot

            return row_dot(self.dout, self.out)
        return (self.dout.float() * self.out.float()).sum(-1).transpose(1, 2).contiguous()


class Grads(NamedTuple):
    """dq [B, Sq, N, D], the carry included; dkv [2, B, Sk, H, D]; columns [2, B, N, C, D] or None."""

    dq: Tensor
    dkv: Tensor
    columns: Tensor | None


def joined(carry: Tensor | None, dq: Tensor, dtype: torch.dtype | None) -> Tensor:
    """carry + dq in fp32, then in the wanted dtype, fp32 by default."""
    total = dq if carry is None else carry + dq
    return total.to(dtype or torch.float32)
