"""What goes into a kernel backend and what comes out. Not in the package file, where backends' names hide libraries."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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
    """What the queries attend to at once: kept blocks of the keys of a hop and, at one hop of a pass, the columns.

    front: [2, B, rows + Sk, H, D] or None: k and v are its last Sk rows, and the rows before them are free for use.
    """

    k: Tensor
    v: Tensor
    blocks: BlockIndex
    columns: GatheredColumns | None = None
    front: Tensor | None = None


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
    """dq [B, Sq, N, D] or the carry of the next call; dkv [2, B, Sk, H, D]; columns fp32 [2, B, N, C, D] or None."""

    dq: Any
    dkv: Tensor
    columns: Tensor | None


def joined(carry: Tensor | None, dq: Tensor, into: Tensor | None) -> Tensor:
    """carry + dq in fp32, in `into` if that is given."""
    total = dq.float() if carry is None else carry + dq
    return total if into is None else into.copy_(total)


class Traits(NamedTuple):
    """How a backend wants its keys.

    causal_without_lists: BlockIndex.causal will do. own_with_others: a rank's own keys may be followed by those of
    others. backward_by_query: its backward pass reads the lists by query, too.
    """

    causal_without_lists: bool = False
    own_with_others: bool = True
    backward_by_query: bool = True


def no_front_rows(size: "Size", *, backward: bool) -> int:
    """Of backends whose columns have loops of their own."""
    return 0


class Size(NamedTuple):
    """What one key head and its query heads have to do at once.

    queries, keys, columns: how many of them; group: query heads.
    """

    batch: int
    queries: int
    keys: int
    columns: int
    group: int
    dim: int
    block: int

    def list_bytes(self) -> int:
        """Most bytes of the block lists in one order, int32 entries."""
        pairs = -(-self.queries // self.block) * -(-self.keys // self.block)
        return 4 * self.batch * self.group * pairs
