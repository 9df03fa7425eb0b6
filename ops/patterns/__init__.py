"""Patterns: which keys a layer keeps. Each module has `build(q, k, place, config, scale) -> DistanceIndex`.

`place` says where this rank's tokens lie (layout and ring). The index is global and equal on all ranks of the ring.
"""

from typing import NamedTuple

from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Ring


class Place(NamedTuple):
    """A rank's place in the sequence: the layout of the tokens and the ring of the ranks."""

    layout: Layout
    ring: Ring
