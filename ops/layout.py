"""Which global token a rank's local token is.

    8 chunks over 2 ranks      rank 0        rank 1
    contiguous                 0 1 2 3       4 5 6 7
    striped                    0 2 4 6       1 3 5 7       stripes of `granularity` tokens
    zigzag (4 chunks)          0 3           1 2           two mirrored chunks a rank

    stripes on 2 nodes of 2    rank 0        rank 1        rank 2        rank 3
    inner=2                    0 5 8 13      1 4 9 12      2 7 10 15     3 6 11 14

In a hierarchical ring the keys of a hop do not lie equally far back for all ranks: inner circles turn back at the
border of a node. So stripes turn, too, by one rank within each node from one round of stripes to the next: over the
rounds every rank stands at every place of its node, and a hop is as much work for all.

Sequences are padded at the end to the next length that every rank can share in whole blocks, so a local block of
`block` tokens is always one global block. Padding comes after every real token, hence no causal query ever sees it.
Token order is set once, in the collator; no layer shuffles.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from mtraining_nns.ops.config import LAYOUTS, AttentionConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Geometry of one global sequence of `seq_len` tokens over `world` ranks, `inner` of them a node or all in one.

    Raises ValueError for an unknown kind and for a granularity that is no multiple of the block.
    Source: Striped Attention (block-level stripes of MTraining, section 4.2) and zigzag ring attention.
    """

    seq_len: int
    world: int = 1
    kind: str = "striped"
    block: int = 128
    granularity: int | None = None
    inner: int | None = None

    def __post_init__(self):
        if self.kind not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.kind!r}")
        if self.seq_len < 1 or self.world < 1 or self.block < 1:
            raise ValueError(
                f"layout needs a length, world and block of at least 1, got {self}; leave out what is empty"
            )
        if self.inner is not None and (self.inner < 1 or self.world % self.inner):
            raise ValueError(
                f"nodes of {self.inner} ranks need a world of a multiple of {self.inner}, got {self.world}"
            )
        if self.stripe % self.block:
            raise ValueError(
                f"granularity must be a multiple of block, got granularity={self.stripe}, block={self.block}"
            )

    @classmethod
    def of(cls, config: AttentionConfig, seq_len: int, world: int, inner: int | None = None) -> "Layout":
        """The layout that a config means for a global sequence on a ring of `world` ranks, `inner` of them a node."""
        geometry = {"kind": config.layout, "block": config.block, "granularity": config.stripe}
        return cls(seq_len=seq_len, world=world, inner=inner, **geometry)

    @property
    def stripe(self) -> int:
        return self.granularity or self.block

    @property
    def chunk(self) -> int:
        """Tokens in a row that never part: the unit that is dealt to ranks."""
        if self.kind == "striped":
            return self.stripe
        parts = self.world if self.kind == "contiguous" else 2 * self.world
        return self.block * -(-self.seq_len // (self.block * parts))

    @property
    def padded_len(self) -> int:
        """Global length after padding."""
        unit = self.chunk * self.world * (2 if self.kind == "zigzag" else 1)
        return unit * -(-self.seq_len // unit)

    @property
    def local_len(self) -> int:
        return self.padded_len // self.world

    @property
    def local_blocks(self) -> int:
        return self.local_len // self.block

    @property
    def global_blocks(self) -> int:
        return self.padded_len // self.block

    def chunks(self, rank: int) -> torch.Tensor:
        """int64 [local_len / chunk]: the global chunks of a rank in local order.

        >>> Layout(seq_len=8, world=2, kind="zigzag", block=2).chunks(0).tolist()
        [0, 3]
        """
        if self.kind == "contiguous":
            return torch.tensor([rank])
        if self.kind == "zigzag":
            return torch.tensor([rank, 2 * self.world - 1 - rank])
        rounds, inner = torch.arange(self.padded_len // (self.chunk * self.world)), self.inner or 1
        return rounds * self.world + rank // inner * inner + (rank - rounds) % inner

    def positions(self, rank: int, device=None) -> torch.Tensor:
        """int64 [local_len]: global position of each local token; values >= seq_len are padding. Do not write."""
        return _tables(self, rank, torch.device(device or "cpu"))[0]

    def block_starts(self, rank: int, device=None) -> torch.Tensor:
        """int32 [local_blocks]: global position of each local block's first token. Shared, do not write."""
        return _tables(self, rank, torch.device(device or "cpu"))[1]

    def starts_of(self, ranks: tuple[int, ...], device=None) -> torch.Tensor:
        """int32 [len(ranks) * local_blocks]: the same of several ranks end to end. Shared, do not write."""
        return _starts(self, ranks, torch.device(device or "cpu"))

    def own_blocks(self, rank: int, device=None) -> torch.Tensor:
        """int32 [global_blocks]: where a rank keeps each global block, -1 if another rank does. Shared, do not write.

        >>> Layout(seq_len=8, world=2, kind="zigzag", block=2).own_blocks(0).tolist()
        [0, -1, -1, 1]
        """
        return _tables(self, rank, torch.device(device or "cpu"))[2]

    def locate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank, local index) of global positions; any shape, values outside the sequence give some rank and index."""
        chunk = positions // self.chunk
        if self.kind == "contiguous":
            rank, local = chunk, torch.zeros_like(chunk)
        elif self.kind == "zigzag":
            rank, local = torch.minimum(chunk, 2 * self.world - 1 - chunk), (chunk >= self.world).to(chunk.dtype)
        else:
            local, place = chunk // self.world, chunk % self.world
            inner = self.inner or 1
            rank = place - place % inner + (place + local) % inner
        return rank, local * self.chunk + positions % self.chunk

    def permutation(self) -> torch.Tensor:
        """int64 [padded_len]: global position of each token when the ranks' shards are laid end to end."""
        return torch.cat([self.positions(rank) for rank in range(self.world)])

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1, pad_value: float = 0) -> torch.Tensor:
        """Local part of a global tensor: `seq_len` long along `dim`, padded here, `local_len` long on return."""
        if x.shape[dim] != self.seq_len:
            raise ValueError(f"shard needs {self.seq_len} tokens along dim {dim}, got shape {tuple(x.shape)}")
        positions = self.positions(rank, x.device)
        local = x.index_select(dim, positions.clamp_max(self.seq_len - 1))
        shape = [1] * x.dim()
        shape[dim] = -1
        return local.masked_fill((positions >= self.seq_len).view(shape), pad_value)

    def unshard(self, shards: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Global tensor from the `world` local ones, padding removed."""
        if len(shards) != self.world or any(s.shape[dim] != self.local_len for s in shards):
            raise ValueError(
                f"unshard needs {self.world} shards of {self.local_len} tokens along dim {dim},"
                f" got {[tuple(s.shape) for s in shards]}"
            )
        joined = torch.cat(shards, dim)
        order = self.permutation().to(joined.device).argsort()
        return joined.index_select(dim, order[: self.seq_len])


@lru_cache(maxsize=1024)
def _starts(layout: Layout, ranks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.cat([layout.block_starts(rank, device) for rank in ranks])


@lru_cache(maxsize=32)  # megabytes each: an evaluation sees a new length with every sample
def _tables(layout: Layout, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # kept on the device: copying them there in every layer would make the host wait for the stream
    positions = (layout.chunks(rank)[:, None] * layout.chunk + torch.arange(layout.chunk)).reshape(-1)
    starts = positions[:: layout.block]
    own = torch.full([layout.global_blocks], -1, dtype=torch.int32)
    own[starts // layout.block] = torch.arange(len(starts), dtype=torch.int32)
    return positions.to(device), starts.to(device, torch.int32), own.to(device)
