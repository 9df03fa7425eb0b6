"""The forward and the backward pass of one call of the operator, hop by hop around the ring.

    out = attend(q, k, v, call)          [B, S, N, D], with gradients for all three

`ops/hops.py` says which keys come when, and how dK and dV get home:

    a hop       blocks of the keys of one rank or several, merged into fp32 (out, lse); the next keys are under way
    forward     columns, gathered over the ring under the first hops, belong to the last one
    backward    columns belong to the first hop, so that their dK and dV are summed over the ring under the others

Heads are treated in chunks, so that lists and workspaces stay small, and where keys are gathered, so that those of one
chunk come while another is computed.

What is kept, where it lies and which kernels run is decided before (`Call`); nothing here waits for the device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mtraining_nns.ops.columns import Columns
from mtraining_nns.ops.hops import Homeward, Hop, Journey
from mtraining_nns.ops.index import COLUMN_TILE, BlockIndex, Index
from mtraining_nns.ops.kernels import GatheredColumns, Keys, Size, Tape
from mtraining_nns.ops.lists import block_lists, column_tiles
from mtraining_nns.ops.merge import Partial
from mtraining_nns.ops.patterns import Place
from mtraining_nns.ops.ring import placing
from mtraining_nns.ops.store import IndexStore

WORKSPACE_BYTES = 5 << 29  # lists and workspaces of the heads that are treated at once
CHUNKS = 4  # of gathered keys, at least, if there are as many key heads


def attend(q, k, v, call: "Call") -> torch.Tensor:
    """Attention of contiguous q [B, S, N, D] to k and v [B, S, H, D] of the whole ring; S local."""
    return _SparseRing.apply(q, k, v, call)


@dataclass(frozen=True)
class Call:
    """One call of the operator: what is kept, where, and how it is computed."""

    index: Index
    place: Place
    forward: Any  # kernels
    backward: Any
    scale: float
    layer: int
    store: IndexStore
    token: int | None

    def rows(self) -> Columns | None:
        """Where this rank's columns lie."""
        return self.index.columns and Columns(self.index.columns, *self.place)

    def gather(self, rows: Columns | None, k, v) -> Callable[[], GatheredColumns | None]:
        """Send for the columns of the ring; the result gives them, and who sees them."""
        if rows is None:
            return lambda: None
        with placing(f"columns of layer {self.layer}"):
            pending = rows.gather(k, v)
        tiles = column_tiles(self.index.columns, self._starts(self.place.ring.rank))

        @functools.cache
        def arrive() -> GatheredColumns:
            with placing(f"columns of layer {self.layer}"):
                return GatheredColumns(pending.wait(), tiles)

        return arrive

    def chunks(self, q, k, kernels) -> list["Chunk"]:
        """What is treated at once in a hop of a pass."""
        kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        each = 0 if self.index.dense else kernels.workspace_bytes(self.size(q, k))
        step = max(1, min(kv_heads, WORKSPACE_BYTES // max(each, 1)))
        if self._gathers:
            step = min(step, -(-kv_heads // CHUNKS))
        firsts = range(0, kv_heads, step)
        ends = [min(first + step, kv_heads) for first in firsts]
        return [Chunk(slice(a * group, b * group), slice(a, b)) for a, b in zip(firsts, ends)]

    def size(self, q, k) -> Size:
        """Of one key head at a hop."""
        batch, queries, heads, dim = q.shape
        keys = k.shape[1] * (self.place.ring.levels[1].world if self._gathers else 1)
        columns = 0 if self.index.columns is None else self.index.columns.position.shape[-1]
        filled = -(-columns // COLUMN_TILE) * COLUMN_TILE
        return Size(batch, queries, keys, filled, heads // k.shape[2], dim, self.index.block)

    def journey(self, q, k, v, chunks: list["Chunk"], *, both: bool) -> Journey:
        """The keys of the ring, in the order of a forward pass or of a backward one (both)."""
        kernels = self.backward if both else self.forward
        front = kernels.front_rows(self.size(q, k), both=both) if self.index.columns else 0
        pieces, name = [chunk.kv_heads for chunk in chunks], f"keys of layer {self.layer}"
        apart = not kernels.OWN_WITH_OTHERS
        return Journey(self.place.ring, k, v, name, pieces=pieces, backward=both, front=front, apart=apart)

    def keys(self, hop: Hop, columns: Callable[[], GatheredColumns | None], heads: slice, *, both: bool) -> Keys:
        """What some heads see at a hop; both: by key block, too, as backward passes need it."""
        blocks = self._blocks(hop, heads, both=both)
        k, v, front = hop.arrive()
        gathered = columns() if hop.columns else None
        return Keys(k, v, blocks, gathered and gathered.heads(heads), front)

    @property
    def _gathers(self) -> bool:
        ring = self.place.ring
        return ring.mode == "gather" and ring.world > 1

    def _blocks(self, hop: Hop, heads: slice, *, both: bool) -> BlockIndex:
        own, kernels = self.place.ring.rank, self.backward if both else self.forward
        q_starts, k_starts = self._starts(own), torch.cat([self._starts(source) for source in hop.sources])
        if self.index.dense and hop.sources == (own,) and kernels.CAUSAL_WITHOUT_LISTS:
            return BlockIndex.causal(q_starts, self.index.block)
        return block_lists(self.index.heads(heads), q_starts, k_starts, diagonal=own in hop.sources, both=both)

    def _starts(self, rank: int) -> torch.Tensor:
        return self.place.layout.block_starts(rank, self.index.device)


class Chunk(NamedTuple):
    """Query heads, and their key heads."""

    heads: slice
    kv_heads: slice


def _joined(parts, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _SparseRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call: Call):
        out, lse = _forward(q, k, v, call)
        # the token travels with the tensors: recomputed ones bring the token of the index that they were made with
        ctx.save_for_backward(q, k, v, out, lse, torch.tensor(-1 if call.token is None else call.token))
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, token = ctx.saved_tensors
        if ctx.call.token not in (None, token.item()):
            raise RuntimeError(
                "a recomputed forward pass took the index of another call of the same layer; with activation"
                " checkpointing, go back through the calls of a layer in the reverse order of their forward passes"
            )
        ctx.call.store.drop(ctx.call.token)
        with torch.autocast(dout.device.type, enabled=False):
            grads = _backward(q, k, v, Tape(dout.contiguous(), out, lse, ctx.call.scale), ctx.call)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None


def _forward(q, k, v, call: Call) -> Partial:
    chunks = call.chunks(q, k, call.forward)
    journey, columns = call.journey(q, k, v, chunks, both=False), call.gather(call.rows(), k, v)
    out, parts = torch.empty_like(q), [None] * len(chunks)
    for hop in journey:
        heads, c = chunks[hop.piece].heads, hop.piece
        parts[c] = call.forward.forward(
            q[:, :, heads],
            call.keys(hop, columns, heads, both=False),  # unnamed: gone before the next ones
            scale=call.scale,
            carry=parts[c],
            into=out[:, :, heads] if hop.last else None,
        )
    return Partial(out, _joined([part.lse for part in parts], 1))


def _backward(q, k, v, tape: Tape, call: Call):
    """(dq in q's dtype, dk, dv)."""
    ring, rows, chunks = call.place.ring, call.rows(), call.chunks(q, k, call.backward)
    journey, home = call.journey(q, k, v, chunks, both=True), Homeward(ring, call.layer)
    columns, tapes = call.gather(rows, k, v), [tape.heads(chunk.heads) for chunk in chunks]
    dq, carried, sums = torch.empty_like(q), [None] * len(chunks), [None] * len(chunks)
    for hop in journey:
        heads, c = chunks[hop.piece].heads, hop.piece
        if hop.first:
            carried[c] = call.backward.begin(q[:, :, heads], tapes[c])
        keys = call.keys(hop, columns, heads, both=True)
        into = dq[:, :, heads] if hop.last else None
        found = call.backward.backward(q[:, :, heads], keys, tapes[c], carry=carried[c], into=into)
        del keys  # before the next ones
        carried[c] = found.dq
        if found.columns is not None:
            with placing(f"columns of layer {call.layer}"):
                sums[c] = rows.start_sum(found.columns)
        home.add(hop, found.dkv)
    dkv = _joined(home.finish(), 3)
    if rows is not None:
        with placing(f"columns of layer {call.layer}"):
            rows.add(_joined([part.wait() for part in sums], 2), dkv)
    return dq, *dkv
