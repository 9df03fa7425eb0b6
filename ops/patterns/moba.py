"""MoBA, mixture of block attention: each query takes its own chunk of keys and the best earlier ones whole.

    gate(c) = mean of the keys of chunk c, tokens c * chunk to (c + 1) * chunk, the last one shorter
    query i in chunk o takes  o, causally, and of the chunks before o the top_k - 1 with the largest q[i] . gate(c)

Ties go to the earlier chunk. Blocks are listed where any query of a block takes their chunk, and a bit a query and
chunk says which do (`RowIndex.row_bits`), so only backends with row bits serve. Padded keys are in no mean, padded
queries take their own chunk alone.

Over the ring go only the chunks' sums of keys. Sums and scores are made in fp64 and rounded to fp32: chunks that are
alike tie on any number of ranks, in whatever order a sum or a matrix product adds. A baseline.

Source: MoBA: Mixture of Block Attention for Long-Context LLMs.
"""

import torch

from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import RowIndex, packed
from mtraining_nns.ops.patterns import Place

ROW_BITS = True
CHUNK_ELEMENTS = 1 << 24  # scores held at once


def most_columns(config: AttentionConfig, seq_len: int) -> int:
    """None: whole blocks alone."""
    return 0


def build(q, k, place: Place, config: AttentionConfig, scale: float) -> RowIndex:
    """q [B, S_local, N, D], k [B, S_local, H, D] -> index of this rank's query blocks."""
    layout, ring = place
    means = chunk_means(k, place, config.chunk)
    positions = layout.positions(ring.rank, q.device)[: q.shape[1]]
    step = max(1, CHUNK_ELEMENTS // (q.shape[0] * q.shape[2] * means.shape[2] * config.block)) * config.block
    masks, bits = [], []
    for part, places in zip(q.split(step, 1), positions.split(step), strict=True):
        taken = chosen_chunks(part, means, places // config.chunk, config.top_k, real=places < layout.seq_len)
        bits.append(packed(torch.nn.functional.pad(taken, (0, -taken.shape[-1] % 32))))
        blocks = torch.nn.functional.pad(taken, (0, 0, 0, -taken.shape[2] % config.block))
        masks.append(blocks.unflatten(2, (-1, config.block)).any(3))
    starts = layout.block_starts(ring.rank, q.device)
    return RowIndex(
        mask=torch.cat(masks, 2), starts=starts, block=config.block, span=config.chunk, row_bits=torch.cat(bits, 2)
    )


def chunk_means(k, place: Place, chunk: int) -> torch.Tensor:
    """fp32 [B, H, chunks, D]: mean of the real keys of each chunk of the sequence, 0 where there are none."""
    layout, ring = place
    firsts = torch.arange(0, layout.padded_len, chunk, device=k.device)
    real = layout.positions(ring.rank, k.device)[: k.shape[1]] < layout.seq_len
    k = torch.where(real[:, None, None], k, 0)
    k = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, -k.shape[1] % layout.block))
    sums = k.unflatten(1, (-1, layout.block)).sum(2, dtype=torch.float64)
    # a product with zeros and ones adds in one order, where index_add on a GPU would not
    mine = (layout.block_starts(ring.rank, k.device) // chunk == firsts[:, None] // chunk).double()
    sums = ring.sum(torch.einsum("cj,bjhd->bhcd", mine, sums).contiguous())
    return (sums / (layout.seq_len - firsts).clamp(1, chunk)[:, None]).float()


def chosen_chunks(q, means, own, top_k: int, *, real) -> torch.Tensor:
    """bool [B, N, rows, chunks]: what each query takes.

    q [B, rows, N, D]; means [B, H, chunks, D]; own [rows] each query's chunk; real: bool [rows], no padding.
    """
    groups = q.double().transpose(1, 2).unflatten(1, (means.shape[1], -1))
    scores = (groups @ means[:, :, None].double().transpose(-1, -2)).flatten(1, 2).float()
    chunks = torch.arange(means.shape[2], device=q.device)
    earlier = chunks < own[:, None]
    order = scores.masked_fill_(~earlier, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., : top_k - 1], True)
    return (best & earlier & real[:, None]) | (chunks == own[:, None])
