"""Every causal key: the index of full attention, so that dense layers run through the same ring and kernels."""

from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import DistanceIndex

ROW_BITS = False


def most_columns(config: AttentionConfig, seq_len: int) -> int:
    """None: whole blocks alone."""
    return 0


def build(q, k, place, config: AttentionConfig, scale: float) -> DistanceIndex:
    """Keep all; q, k only tell the batch, heads and device."""
    return DistanceIndex.keep_all(q.shape[0], q.shape[2], place.layout.global_blocks, place.layout.block, q.device)
