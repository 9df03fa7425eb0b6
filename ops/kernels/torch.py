"""Sparse attention in plain torch, vectorised over heads and over the kept blocks of a query block.

The backend for CPUs: one gather and two matrix products for each query block. On a GPU it works but waits for the
device once a query block; use the Triton backend there. Scores and sums are fp32 for every input type.
"""

import torch

from mtraining_nns.ops.index import BlockIndex, ColumnIndex
from mtraining_nns.ops.kernels import Grads, Tape
from mtraining_nns.ops.merge import Partial, merge


def blocks_forward(q, kv, index: BlockIndex, *, scale, carry=None, out_dtype=None) -> Partial:
    """Attention over the listed blocks, merged with `carry`."""
    part = _empty(q)
    blocks = [_block_view(x, index.block) for x in kv]
    for row in _rows(q, index):
        k, v = (_gather(x, row.listed) for x in blocks)
        _write(part, row.tokens, _softmax(_scores(q, k, row, scale), v))
    part = merge(carry, part)
    return Partial(part.out.to(out_dtype or torch.float32), part.lse)


def blocks_backward(q, kv, index: BlockIndex, tape: Tape, grads: Grads) -> None:
    """Gradients over the listed blocks, added into `grads`."""
    blocks = [_block_view(x, index.block) for x in kv]
    sums = [torch.zeros_like(x) for x in blocks]
    for row in _rows(q, index):
        k, v = (_gather(x, row.listed) for x in blocks)
        found = _row_grads(q, (k, v), row, tape)
        grads.dq[:, row.tokens] += found.dq
        for total, part in zip(sums, found[1:], strict=True):
            _scatter(total, row.listed, part)
    for grad, total in zip(grads[1:], sums, strict=True):
        grad += total.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : grad.shape[1]]


def columns_forward(q, kv, columns: ColumnIndex, q_starts, *, scale, carry=None) -> Partial:
    """Attention to the gathered columns, merged with `carry`."""
    part = _empty(q)
    for row in _column_rows(q, columns, q_starts):
        k, v = (x[:, :, : row.width].float() for x in kv)
        _write(part, row.tokens, _softmax(_scores(q, k, row, scale), v))
    return merge(carry, part)


def columns_backward(q, kv, columns: ColumnIndex, q_starts, tape: Tape, grads: Grads) -> None:
    """Gradients of the gathered columns, added into `grads`."""
    for row in _column_rows(q, columns, q_starts):
        k, v = (x[:, :, : row.width].float() for x in kv)
        found = _row_grads(q, (k, v), row, tape)
        grads.dq[:, row.tokens] += found.dq
        grads.dk[:, :, : row.width] += found.dk
        grads.dv[:, :, : row.width] += found.dv


class _Row:
    """One query block: its tokens, the blocks it lists (int64 [B, N, m]) and its mask over the m gathered blocks."""

    def __init__(self, tokens, keep, listed=None):
        self.tokens, self.keep, self.listed, self.width = tokens, keep, listed, keep.shape[-1]


def _rows(q, index: BlockIndex):
    offsets = torch.arange(index.block, device=q.device)
    for i in range(len(index.q_starts)):
        tokens = slice(i * index.block, min((i + 1) * index.block, q.shape[1]))
        longest = int(index.count[:, :, i].max())
        if longest == 0:
            continue
        listed = index.index[:, :, i, :longest].long()
        valid = torch.arange(longest, device=q.device) < index.count[:, :, i, None]
        keys = index.k_starts[listed][..., None] + offsets
        queries = index.q_starts[i] + offsets[: tokens.stop - tokens.start]
        keep = valid[..., None, :, None] & (keys[:, :, None] <= queries[:, None, None])
        if index.row_bits is not None:
            keep = keep & _bits(index, tokens, listed)[..., None]
        yield _Row(tokens, keep.flatten(-2), torch.where(valid, listed, 0))


def _bits(index: BlockIndex, tokens, listed):
    """bool [B, N, rows, m]: the row bit of each listed block's chunk."""
    chunk = (index.k_starts[listed] // index.row_chunk)[:, :, None]
    words = index.row_bits[:, :, tokens]
    word = words.gather(-1, (chunk // 32).long().expand(*words.shape[:3], -1))
    return (word >> (chunk % 32)) & 1 == 1


def _column_rows(q, columns: ColumnIndex, q_starts):
    visible = columns.visible(q_starts)
    for i, start in enumerate(q_starts):
        tokens = slice(i * columns.block, min((i + 1) * columns.block, q.shape[1]))
        width = int(visible[..., i].max())
        if width:
            seen = columns.seen(start)[..., :width]
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


def _row_grads(q, kv, row, tape: Tape) -> Grads:
    k, v = kv
    lse, delta = (x[:, :, row.tokens, None] for x in (tape.lse, tape.delta))
    dout = tape.dout[:, row.tokens].float().transpose(1, 2)
    weights = _scores(q, k, row, tape.scale).sub_(lse.nan_to_num(neginf=0.0)).exp_()
    dscores = (dout @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(tape.scale)
    queries = q[:, row.tokens].float().transpose(1, 2)
    return Grads((dscores @ k).transpose(1, 2), dscores.transpose(-1, -2) @ queries, weights.transpose(-1, -2) @ dout)


def _empty(q) -> Partial:
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
    return Partial(torch.zeros(q.shape, device=q.device), lse)


def _write(part: Partial, tokens, row: Partial) -> None:
    part.out[:, tokens], part.lse[:, :, tokens] = row
