"""Sparse attention in plain torch, vectorised over heads and over the kept blocks of a query block.

The backend for CPUs: one gather and two matrix products for each query block. On a GPU it works but waits for the
device once a query block; use the Triton backend there. Scores and sums are fp32 for every input type.
"""

import torch

from mtraining_nns.ops.index import BlockIndex, unpacked
from mtraining_nns.ops.kernels.contract import Grads, Keys, Tape, Traits, joined
from mtraining_nns.ops.kernels.contract import no_front_rows as front_rows  # noqa: F401
from mtraining_nns.ops.kernels.sizes import lists_alone as workspace_bytes  # noqa: F401
from mtraining_nns.ops.merge import Partial, merge

TRAITS = Traits()


def forward(q, keys: Keys, *, scale, carry=None, into=None) -> Partial:
    """Attention over the listed blocks and the columns, merged with `carry`."""
    part = merge(carry, _blocks_forward(q, keys, scale))
    if keys.columns is not None:
        part = merge(part, _columns_forward(q, keys, scale))
    return part if into is None else Partial(into.copy_(part.out), part.lse)


def begin(q, tape: Tape) -> None:
    """Nothing is carried."""


def backward(q, keys: Keys, tape: Tape, *, carry, into=None) -> Grads:
    """Gradients over the listed blocks and the columns."""
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dkv = _blocks_backward(q, keys, tape, dq)
    columns = None if keys.columns is None else _columns_backward(q, keys, tape, dq)
    return Grads(joined(carry, dq, into), dkv, columns)


def _blocks_forward(q, keys: Keys, scale) -> Partial:
    part = _empty(q)
    blocks = [_block_view(x, keys.blocks.block) for x in (keys.k, keys.v)]
    for row in _rows(q, keys.blocks):
        k, v = (_gather(x, row.listed) for x in blocks)
        _write(part, row.tokens, _softmax(_scores(q, k, row, scale), v))
    return part


def _blocks_backward(q, keys: Keys, tape: Tape, dq) -> torch.Tensor:
    blocks = [_block_view(x, keys.blocks.block) for x in (keys.k, keys.v)]
    sums = [torch.zeros_like(x) for x in blocks]
    for row in _rows(q, keys.blocks):
        k, v = (_gather(x, row.listed) for x in blocks)
        found, *parts = _row_grads(q, (k, v), row, tape)
        dq[:, row.tokens] += found
        for total, part in zip(sums, parts, strict=True):
            _scatter(total, row.listed, part)
    return torch.stack([x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : keys.k.shape[1]] for x in sums])


def _columns_forward(q, keys: Keys, scale) -> Partial:
    part = _empty(q)
    for row in _column_rows(q, keys):
        k, v = (x[:, :, : row.width].float() for x in keys.columns.kv)
        _write(part, row.tokens, _softmax(_scores(q, k, row, scale), v))
    return part


def _columns_backward(q, keys: Keys, tape: Tape, dq) -> torch.Tensor:
    grads = torch.zeros_like(keys.columns.kv, dtype=torch.float32)
    for row in _column_rows(q, keys):
        k, v = (x[:, :, : row.width].float() for x in keys.columns.kv)
        found, *parts = _row_grads(q, (k, v), row, tape)
        dq[:, row.tokens] += found
        for grad, part in zip(grads, parts, strict=True):
            grad[:, :, : row.width] += part
    return grads


class _Row:
    """One query block: its tokens, the blocks it lists (int64 [B, N, m]) and its mask over the m gathered blocks."""

    def __init__(self, tokens, keep, listed=None):
        self.tokens, self.keep, self.listed, self.width = tokens, keep, listed, keep.shape[-1]


def _rows(q, index: BlockIndex):
    count, lists = (x.expand(q.shape[0], q.shape[2], *x.shape[2:]) for x in index.by_query)
    offsets = torch.arange(index.block, device=q.device)
    for i in range(len(index.q_starts)):
        longest = int(count[:, :, i].max())
        if longest == 0 and not index.diagonal:
            continue
        tokens = slice(i * index.block, min((i + 1) * index.block, q.shape[1]))
        valid = torch.arange(longest, device=q.device) < count[:, :, i, None]
        listed = torch.where(valid, lists[:, :, i, :longest], 0).long()
        keep = valid[..., None, :, None].expand(-1, -1, tokens.stop - tokens.start, -1, index.block)
        if index.diagonal:
            causal = offsets <= offsets[: tokens.stop - tokens.start, None]
            keep = torch.cat([keep, causal[:, None].expand(*keep.shape[:2], -1, -1, -1)], -2)
            listed = torch.nn.functional.pad(listed, (0, 1), value=i)
        if index.row_bits is not None:
            keep = keep & _bits(index, tokens, listed)[..., None]
        yield _Row(tokens, keep.flatten(-2), listed)


def _bits(index: BlockIndex, tokens, listed):
    """bool [B, N, rows, m]: the row bit of each listed block's chunk."""
    chunk = (index.k_starts[listed] // index.row_chunk)[:, :, None]
    words = index.row_bits[:, :, tokens]
    word = words.gather(-1, (chunk // 32).long().expand(*words.shape[:3], -1))
    return (word >> (chunk % 32)) & 1 == 1


def _column_rows(q, keys: Keys):
    tiles, block = keys.columns.tiles, keys.blocks.block
    for i in range(tiles.visible.shape[2]):
        tokens = slice(i * block, min((i + 1) * block, q.shape[1]))
        width = int(tiles.visible[:, :, i].max())
        if width:
            seen = unpacked(tiles.bits[:, :, i, : -(-width // 32)])[..., :width]
            yield _Row(tokens, seen[:, :, None].expand(-1, -1, tokens.stop - tokens.start, -1))


def _block_view(x, block):
    """[B, S, H, D] -> fp32 [B, H, n, block, D], the last block filled with zeros."""
    pad = -x.shape[1] % block
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, pad))
    return x.unflatten(1, (-1, block)).permute(0, 3, 1, 2, 4).contiguous()


def _address(blocks, listed):
    """int64 [B, N, m]: row of each listed block in blocks.flatten(0, 2)."""
    batch, kv_heads, num_blocks = blocks.shape[:3]
    head = torch.arange(listed.shape[1], device=listed.device) // (listed.shape[1] // kv_heads)
    base = torch.arange(batch, device=listed.device)[:, None] * kv_heads + head
    return base[..., None] * num_blocks + listed


def _gather(blocks, listed):
    """[B, N, m * block, D] of the listed blocks, each query head from its own key head."""
    return blocks.flatten(0, 2)[_address(blocks, listed)].flatten(2, 3)


def _scatter(total, listed, part):
    part = part.unflatten(2, (-1, total.shape[3])).flatten(0, 2)
    total.flatten(0, 2).index_add_(0, _address(total, listed).flatten(), part)


def _scores(q, k, row, scale):
    queries = q[:, row.tokens].float().transpose(1, 2)
    return (queries @ k.transpose(-1, -2)).mul_(scale).masked_fill_(~row.keep, -torch.inf)


def _softmax(scores, v) -> Partial:
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse.nan_to_num(neginf=0.0)[..., None]).exp_()
    return Partial((weights @ v).transpose(1, 2), lse)


def _row_grads(q, kv, row, tape: Tape):
    """dq, dk, dv of one row."""
    k, v = kv
    lse, delta = (x[:, :, row.tokens, None] for x in (tape.lse, tape.delta))
    dout = tape.dout[:, row.tokens].float().transpose(1, 2)
    weights = _scores(q, k, row, tape.scale).sub_(lse.nan_to_num(neginf=0.0)).exp_()
    dscores = (dout @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(tape.scale)
    queries = q[:, row.tokens].float().transpose(1, 2)
    return (dscores @ k).transpose(1, 2), dscores.transpose(-1, -2) @ queries, weights.transpose(-1, -2) @ dout


def _empty(q) -> Partial:
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    return Partial(out, out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf))


def _write(part: Partial, tokens, row: Partial) -> None:
    part.out[:, tokens], part.lse[:, :, tokens] = row
