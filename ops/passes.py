"""The forward and the backward pass of one call of the operator, hop by hop around the ring.

    out = attend(q, k, v, call)          [B, S, N, D], with gradients for all three

`ops/hops.py` says which keys come when, and how dK and dV get home:

    a hop       blocks of the keys of one rank or several, merged into fp32 (out, lse); the next keys are under way
    forward     columns, gathered over the ring under the first hops, belong to the last one
    backward    columns belong to the first hop, so that their dK and dV are summed over the ring under the others

What is kept, where it lies and which kernels run is decided before (`Call`); nothing here waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mtraining_nns.ops.columns import Columns
from mtraining_nns.ops.hops import Homeward, Hop, Journey
from mtraining_nns.ops.index import BlockIndex, Index
from mtraining_nns.ops.kernels import GatheredColumns, Keys, Tape
from mtraining_nns.ops.lists import block_lists, column_tiles
from mtraining_nns.ops.merge import Partial
from mtraining_nns.ops.patterns import Place
from mtraining_nns.ops.ring import placing
from mtraining_nns.ops.store import IndexStore

WORKSPACE_BYTES = 5 << 29  # lists and workspaces of the heads that are treated at once


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

        def arrive() -> GatheredColumns:
            with placing(f"columns of layer {self.layer}"):
                return GatheredColumns(pending.wait(), tiles)

        return arrive

    def chunks(self, q, k, kernels) -> list["Chunk"]:
        """What is treated at once in every hop of a pass, so that lists and workspaces stay small."""
        kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        width = 0 if self.index.columns is None else self.index.columns.position.shape[-1]
        each = 0 if self.index.dense else kernels.workspace_bytes(q, k, self.index.block, width)
        step = max(1, min(kv_heads, WORKSPACE_BYTES // max(each, 1)))
        firsts = range(0, kv_heads, step)
        ends = [min(first + step, kv_heads) for first in firsts]
        return [Chunk(slice(a * group, b * group), slice(a, b)) for a, b in zip(firsts, ends)]

    def keys(self, hop: Hop, columns: GatheredColumns | None, chunk: "Chunk", *, both: bool) -> Keys:
        """What some heads see at a hop; both: by key block, too, as backward passes need it."""
        own = self.place.ring.rank
        q_starts, k_starts = self._starts(own), torch.cat([self._starts(source) for source in hop.sources])
        diagonal = hop.sources == (own,)
        if self.index.dense and diagonal and (self.backward if both else self.forward).CAUSAL_WITHOUT_LISTS:
            blocks = BlockIndex.causal(q_starts, self.index.block)
        else:
            blocks = block_lists(self.index.heads(chunk.heads), q_starts, k_starts, diagonal=diagonal, both=both)
        k, v = (x[:, :, chunk.kv_heads] for x in hop.kv)
        return Keys(k, v, blocks, columns and columns.heads(chunk.heads))

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
    journey = Journey(call.place.ring, k, v, f"keys of layer {call.layer}")
    columns, chunks = call.gather(call.rows(), k, v), call.chunks(q, k, call.forward)
    parts: list[Partial | None] = [None] * len(chunks)
    for hop in journey:
        gathered, dtype = (columns(), q.dtype) if hop.last else (None, None)
        for c, chunk in enumerate(chunks):
            parts[c] = call.forward.forward(
                q[:, :, chunk.heads],
                call.keys(hop, gathered, chunk, both=False),  # unnamed: gone before the next ones
                scale=call.scale,
                carry=parts[c],
                out_dtype=dtype,
            )
    out, lse = zip(*parts)
    return Partial(_joined(out, 2), _joined(lse, 1))


def _backward(q, k, v, tape: Tape, call: Call):
    """(dq in q's dtype, dk, dv)."""
    ring, rows, chunks = call.place.ring, call.rows(), call.chunks(q, k, call.backward)
    journey, home = Journey(ring, k, v, f"keys of layer {call.layer}", own_last=True), Homeward(ring, call.layer)
    columns, summed = call.gather(rows, k, v), None
    tapes = [tape.heads(chunk.heads) for chunk in chunks]
    dqs = [call.backward.begin(q[:, :, chunk.heads], part) for chunk, part in zip(chunks, tapes)]
    for hop in journey:
        gathered, dtype, found = columns() if hop.first else None, q.dtype if hop.last else None, []
        for c, chunk in enumerate(chunks):
            keys = call.keys(hop, gathered, chunk, both=True)
            found.append(call.backward.backward(q[:, :, chunk.heads], keys, tapes[c], carry=dqs[c], dq_dtype=dtype))
            dqs[c] = found[c].dq
            del keys  # before the next ones
        if hop.first and rows is not None:
            with placing(f"columns of layer {call.layer}"):
                summed = rows.start_sum(_joined([part.columns for part in found], 2))
        home.add(hop, _joined([part.dkv for part in found], 3))
    dkv = home.finish()
    if summed is not None:
        with placing(f"columns of layer {call.layer}"):
            rows.add(summed.wait(), dkv)
    return _joined(dqs, 2), *dkv
