"""A made-up vertical-slash index, for questions about balance where nothing was recorded yet.

    Generated(seq_len=524288, heads=28).index()

Every head keeps the sinks, the local band, `bands` far bands of `band_width` distances, and `columns` single keys.
Places of bands and columns are drawn evenly from the whole sequence. Real heads are not like that: their columns and
bands crowd together, and heads differ in how many they keep (`mtraining record` shows it). So a generated index tells
what a layout does to regular sparsity, not what a model will cost.
"""

from dataclasses import dataclass, fields

import torch

from mtraining_nns.errors import UserError
from mtraining_nns.ops.index import ColumnIndex, DistanceIndex

PATTERNS = ("vertical_slash", "dense")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What to draw; lengths in tokens. UserError for numbers that no sequence can hold."""

    pattern: str = "vertical_slash"
    seq_len: int = 524288
    heads: int = 28
    block: int = 128
    sinks: int = 64
    local: int = 1024
    bands: int = 8
    band_width: int = 64
    columns: int = 1024
    seed: int = 0

    def __post_init__(self):
        if self.pattern not in PATTERNS:
            raise UserError(f"--pattern must be one of {', '.join(PATTERNS)}, got {self.pattern!r}")
        for field in fields(self):
            least = 1 if field.name in ("seq_len", "heads", "block", "band_width") else 0
            if field.type is int and getattr(self, field.name) < least:
                option = "--" + field.name.replace("_", "-")
                raise UserError(f"{option} must be at least {least}, got {getattr(self, field.name)}")
        if self.pattern == "dense":
            return
        if self.sinks + self.columns > self.seq_len:
            raise UserError(
                f"--columns {self.columns} and --sinks {self.sinks} are more than --seq-len {self.seq_len}; lower them"
            )
        if self.bands and self.local + self.band_width > self.seq_len:
            raise UserError(
                f"far bands lie beyond --local {self.local} and need --band-width {self.band_width} more distances,"
                f" --seq-len is {self.seq_len}; lower them or give --bands 0"
            )

    def index(self) -> DistanceIndex:
        """The index of one layer, on the CPU."""
        blocks = -(-self.seq_len // self.block)
        if self.pattern == "dense":
            return DistanceIndex.keep_all(1, self.heads, blocks, self.block, "cpu")
        g = torch.Generator().manual_seed(self.seed)
        hit = torch.stack([self._diagonals(blocks, g) for _ in range(self.heads)])[None]
        position = torch.stack([self._columns(g) for _ in range(self.heads)])[None]
        count = torch.full(position.shape[:2], position.shape[2], dtype=torch.int32)
        columns = ColumnIndex(position=position, count=count, hit=hit, block=self.block)
        return DistanceIndex(hit=hit, block=self.block, columns=columns)

    def _diagonals(self, blocks: int, g: torch.Generator) -> torch.Tensor:
        """bool [n]: block diagonals that hold a kept distance, and the main one."""
        starts = torch.randint(self.local, self.seq_len - self.band_width + 1, (self.bands,), generator=g).tolist()
        hit = torch.zeros(blocks, dtype=torch.bool)
        for first, width in [(0, max(self.local, 1)), *((start, self.band_width) for start in starts)]:
            # distance d lies between blocks floor(d / block) and ceil(d / block) apart
            hit[first // self.block : -(-(first + width - 1) // self.block) + 1] = True
        return hit

    def _columns(self, g: torch.Generator) -> torch.Tensor:
        """int32 [sinks + columns], ascending."""
        far = self.sinks + torch.randperm(self.seq_len - self.sinks, generator=g)[: self.columns]
        return torch.cat([torch.arange(self.sinks), far.sort().values]).int()
