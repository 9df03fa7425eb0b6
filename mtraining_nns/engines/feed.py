"""The batches of a rank: which samples it reads at a step, cut to its part of the ring's layout.

    step 7, dp 2, micro_batch 1, accumulation 2        samples of the step: 12 5 31 8
    ring 0 reads 12, then 31; ring 1 reads 5, then 8   every rank of a ring reads the whole sample and keeps its tokens

Stateless: a step's batches follow from its number. Reading is a slice of a memory map, so there are no workers.
"""

import torch

from mtraining_nns.data.collator import collate
from mtraining_nns.data.dataset import PackedDataset, sample_ids
from mtraining_nns.data.guard import batch_fingerprint
from mtraining_nns.engines.world import World
from mtraining_nns.ops.layout import Layout


class Feed:
    """Batches of one rank from a prepared folder; `guard_steps` first calls compare what the ranks of a ring read."""

    def __init__(self, recipe, world: World, layout: Layout):
        self.dataset = PackedDataset(recipe.data.path, recipe.train.seq_len)
        self.seed, self.train, self.dp, self.batch = recipe.data.seed, recipe.train, recipe.parallel.dp, recipe.batch
        self.world, self.layout = world, layout
        self.guarded = recipe.parallel.data_guard_steps if world.ring.world > 1 else 0

    def ids(self, step: int) -> list[int]:
        """Samples of a step, over all ranks."""
        return sample_ids(step, len(self.dataset), self.batch, self.seed)

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """This rank's micro-batches of a step, on its device."""
        micro, ids = self.train.micro_batch, self.ids(step)
        starts = [(turn * self.dp + self.world.dp_rank) * micro for turn in range(self.train.accumulation)]
        tokens = [torch.stack([self.dataset[i] for i in ids[start : start + micro]]) for start in starts]
        if self.guarded > 0:
            self.guarded -= 1
            self.world.at(f"step {step + 1}, comparing what was read")
            check_same_tokens(torch.cat(tokens), self.world, step)
        return [place(t, self.layout, self.world) for t in tokens]


def place(tokens: torch.Tensor, layout: Layout, world: World) -> dict[str, torch.Tensor]:
    """This rank's part of whole sequences [B, S], on its device."""
    return {key: x.to(world.device) for key, x in collate(tokens, layout, world.ring.rank).items()}


def check_same_tokens(tokens: torch.Tensor, world: World, step: int) -> None:
    """RuntimeError, naming the ranks, unless all ranks of a ring read the same tokens. Collective in the ring."""
    mine = torch.tensor([batch_fingerprint(tokens)], device=world.device)
    prints = [part.item() for part in world.ring.gather(mine)]
    odd = [rank for rank, value in zip(world.ring.ranks, prints) if value != prints[0]]
    if odd:
        raise RuntimeError(
            f"step {step}: ranks {odd} read other tokens than rank {world.ring.ranks[0]} of the same ring;"
            " data.path must hold the same files on every machine"
        )
