"""The batch of one rank: labels shifted over the whole sequence first, then everything cut to the ring's layout.

    tokens     t0 t1 t2 t3 t4 t5          striped(2), 2 ranks: rank 0 holds  t0 t1 t4 t5
    labels     t1 t2 t3 t4 t5  -                               its labels    t1 t2 t5  -
    positions   0  1  2  3  4  5                               its positions  0  1  4  5

The order of the tokens is set here once, so no layer moves them. Shifting after the cut would be wrong: the token
behind the last one of a stripe lives on another rank.
"""

from collections.abc import Sequence

import torch

from mtraining_nns.ops.layout import Layout

IGNORED_LABEL = -100


def collate(
    tokens: torch.Tensor, layout: Layout, rank: int, lengths: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """Local input_ids, labels and position_ids of one rank, each int64 [B, layout.local_len].

    tokens: int64 [B, layout.seq_len], the same whole sequences on every rank of the ring. lengths: how many tokens of
    each are text, all by default. The last one of a sequence and all padding have the label -100; padding beyond
    seq_len has the position seq_len - 1, which every rope table holds. ValueError when the sequences are not of the
    layout's length.
    """
    batch, seq_len = tokens.shape
    last = tokens.new_full((batch, 1), IGNORED_LABEL)
    labels = torch.cat([tokens[:, 1:], last], dim=1)
    for row, length in zip(labels, lengths or ()):
        row[length - 1 :] = IGNORED_LABEL
    positions = layout.positions(rank, device=tokens.device).clamp(max=seq_len - 1)
    return {
        "input_ids": layout.shard(tokens, rank, dim=1, pad_value=0),
        "labels": layout.shard(labels, rank, dim=1, pad_value=IGNORED_LABEL),
        "position_ids": positions.expand(batch, -1).contiguous(),
    }


def collate_ring(tokens: torch.Tensor, layout: Layout, lengths: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
    """The batches of all ranks of a ring end to end, int64 [B, layout.padded_len]: what nnScaler's graphs take."""
    parts = [collate(tokens, layout, rank, lengths) for rank in range(layout.world)]
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
