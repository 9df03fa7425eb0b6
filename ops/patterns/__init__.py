"""Patterns: which keys a layer keeps. Each module has

    build(q, k, place, config, scale) -> Index      q [B, S_local, N, D], k [B, S_local, H, D] of this rank
    most_columns(config, seq_len) -> int            of a head, at most
    ROW_BITS: bool                                  whether the index masks keys row by row

`place` says where this rank's tokens lie (layout and ring). A DistanceIndex is global and equal on all ranks of the
ring; a RowIndex is of this rank's queries alone.
"""

from typing import NamedTuple

from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Ring


class Place(NamedTuple):
    """A rank's place in the sequence: the layout of the tokens and the ring of the ranks."""

    layout: Layout
    ring: Ring
