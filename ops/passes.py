"""The forward and the backward pass of one call of the operator, hop by hop around the ring.

    start = set_out(q, k, v, ...)              the first keys of other ranks are under way
    out = attend(q, k, v, start, call)         [B, S, N, D], with gradients for all three

`ops/hops.py` says which keys come when, `ops/homeward.py` how dK and dV get home:

    a hop       blocks of the keys of one rank or several, merged into fp32 (out, lse); the next keys are under way
    forward     columns, gathered over the ring under the first hops, belong to the last one
    backward    columns belong to the first hop, so that their dK and dV are summed over the ring under the others

Heads are treated in chunks, so that lists and workspaces stay small, and where keys are gathered, so that those of one
chunk come while another is computed.

What is kept, where it lies and which kernels run is decided before; nothing here waits for the device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mtraining_nns.ops import clock
from mtraining_nns.ops.columns import Columns
from mtraining_nns.ops.homeward import Homeward
from mtraining_nns.ops.hops import Hop, Journey
from mtraining_nns.ops.index import COLUMN_TILE, BlockIndex, Index
from mtraining_nns.ops.kernels import GatheredColumns, Keys, Size, Tape
from mtraining_nns.ops.lists import block_lists, column_tiles
from mtraining_nns.ops.merge import Partial
from mtraining_nns.ops.patterns import Place
from mtraining_nns.ops.ring import placing
from mtraining_nns.ops.store import OTHER_CALL, IndexStore, Kept

WORKSPACE_BYTES = 5 << 29  # lists and workspaces of the heads that are treated at once
LIST_BYTES = 10**9  # lists of one order among them
# Gathered keys come in at most so many chunks of heads, each with so many query rows: fewer would cost the host more
# time than they take.
CHUNKS, CHUNK_ROWS = 4, 1 << 19


class Chunk(NamedTuple):
    """Query heads, and their key heads."""

    heads: slice
    kv_heads: slice


class Start(NamedTuple):
    """A pass that has begun: its kernels, the heads that are treated at once, and the keys on their way."""

    kernels: Any
    chunks: list[Chunk]
    journey: Journey
    backward: bool


@torch.no_grad()
def set_out(q, k, v, place: Place, kernels, layer: int, *, block: int, dense: bool, columns: int, backward=False):
    """The Start of a pass. Nothing of it depends on what is kept, but columns: most of them that a head may have."""
    ring, (batch, queries, heads, dim), kv_heads = place.ring, q.shape, k.shape[2]
    gathers = ring.mode == "gather" and ring.world > 1
    keys = k.shape[1] * (ring.levels[1].world if gathers else 1)
    filled = -(-columns // COLUMN_TILE) * COLUMN_TILE
    size = Size(batch, queries, keys, filled, heads // kv_heads, dim, block)
    workspace = 0 if dense else kernels.workspace_bytes(size, backward=backward)
    step = key_heads_at_once(size, kv_heads, workspace, gathers=gathers)
    chunks = [_chunk(first, min(first + step, kv_heads), size.group) for first in range(0, kv_heads, step)]
    journey = Journey(
        ring, k, v, f"keys of layer {layer}", pieces=[chunk.kv_heads for chunk in chunks], backward=backward,
        front=kernels.front_rows(size, backward=backward), apart=not kernels.TRAITS.own_with_others,
    )  # fmt: skip
    return Start(kernels, chunks, journey, backward)


def key_heads_at_once(size: Size, kv_heads: int, workspace_bytes: int, *, gathers: bool) -> int:
    """Key heads of a chunk. workspace_bytes: of one of them, 0 where no lists are needed; gathers: keys of a node."""
    step = kv_heads
    if workspace_bytes:
        step = max(1, min(step, WORKSPACE_BYTES // workspace_bytes, LIST_BYTES // size.list_bytes()))
    if gathers:
        rows = size.batch * size.queries * size.group * kv_heads
        step = min(step, -(-kv_heads // min(CHUNKS, max(1, rows // CHUNK_ROWS))))
    return step


def attend(q, k, v, start: Start | None, call: "Call") -> torch.Tensor:
    """Attention of contiguous q [B, S, N, D] to k and v [B, S, H, D] of the whole ring; S local.

    start: None where the call's own output was kept.
    """
    return _SparseRing.apply(q, k, v, start, call)


@dataclass(frozen=True)
class Call:
    """One call of the operator: what is kept, where, and how it is computed; kept: for the forward pass again."""

    index: Index
    place: Place
    kernels: Any
    scale: float
    layer: int
    store: IndexStore
    kept: Kept | None
    keep_output: bool = False

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

    def set_out_back(self, q, k, v) -> Start:
        """The backward pass."""
        columns = 0 if self.index.columns is None else self.index.columns.position.shape[-1]
        kept = {"block": self.index.block, "dense": self.index.dense, "columns": columns}
        return set_out(q, k, v, self.place, self.kernels, self.layer, **kept, backward=True)

    def keys(self, start: Start, hop: Hop, columns: Callable[[], GatheredColumns | None], heads: slice) -> Keys:
        """What some heads see at a hop."""
        blocks = self._blocks(start, hop, heads)
        k, v, front = hop.arrive()
        gathered = columns() if hop.columns else None
        return Keys(k, v, blocks, gathered and gathered.heads(heads), front)

    def _blocks(self, start: Start, hop: Hop, heads: slice) -> BlockIndex:
        own, traits = self.place.ring.rank, start.kernels.TRAITS
        q_starts, k_starts = self._starts(own), self._starts(*hop.sources)
        if self.index.dense and hop.sources == (own,) and traits.causal_without_lists:
            return BlockIndex.causal(q_starts, self.index.block)
        lists = {"by_query": not start.backward or traits.backward_by_query, "by_key": start.backward}
        return block_lists(self.index.heads(heads), q_starts, k_starts, diagonal=own in hop.sources, **lists)

    def _starts(self, *ranks: int) -> torch.Tensor:
        return self.place.layout.starts_of(ranks, self.index.device)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an address of whole 16 bytes on, as tensor maps need it."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def _chunk(first: int, end: int, group: int) -> Chunk:
    return Chunk(slice(first * group, end * group), slice(first, end))


def _joined(parts, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _SparseRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, start: Start | None, call: Call):
        kept = call.kept
        out, lse = kept.unchanged_output() if start is None else _forward(q, k, v, start, call)
        if call.keep_output and kept is not None:
            kept.keep_output(Partial(out, lse))
        # the token travels with the tensors: recomputed ones bring the token of the index that they were made with
        ctx.save_for_backward(q, k, v, out, lse, torch.tensor(-1 if kept is None else kept.token))
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "sparse attention has no second derivative, got a backward pass with create_graph=True; leave it out"
            )
        q, k, v, out, lse, token = ctx.saved_tensors
        if ctx.call.kept is not None:
            if ctx.call.kept.token != token.item():
                raise RuntimeError(f"layer {ctx.call.layer}: {OTHER_CALL}")
            ctx.call.store.drop(ctx.call.kept.token)
        with torch.autocast(dout.device.type, enabled=False):
            grads = _backward(q, k, v, Tape(aligned(dout), out, lse, ctx.call.scale), ctx.call)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None, None


@clock.span("attention forward")
def _forward(q, k, v, start: Start, call: Call) -> Partial:
    columns = call.gather(call.rows(), k, v)
    out, parts = torch.empty_like(q), [None] * len(start.chunks)
    for hop in start.journey:
        heads, c = start.chunks[hop.piece].heads, hop.piece
        parts[c] = start.kernels.forward(
            q[:, :, heads],
            call.keys(start, hop, columns, heads),  # unnamed: gone before the next ones
            scale=call.scale,
            carry=parts[c],
            into=out[:, :, heads] if hop.last else None,
        )
    return Partial(out, _joined([part.lse for part in parts], 1))


@clock.span("attention backward")
def _backward(q, k, v, tape: Tape, call: Call):
    """(dq in q's dtype, dk, dv)."""
    start, home, rows = call.set_out_back(q, k, v), Homeward(call.place.ring, call.layer), call.rows()
    columns, tapes = call.gather(rows, k, v), [tape.heads(chunk.heads) for chunk in start.chunks]
    dq, carried, sums = torch.empty_like(q), [None] * len(tapes), [None] * len(tapes)
    for hop in start.journey:
        heads, c = start.chunks[hop.piece].heads, hop.piece
        if hop.first:
            carried[c] = start.kernels.begin(q[:, :, heads], tapes[c])
        keys = call.keys(start, hop, columns, heads)
        into = dq[:, :, heads] if hop.last else None
        found = start.kernels.backward(q[:, :, heads], keys, tapes[c], carry=carried[c], into=into)
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
