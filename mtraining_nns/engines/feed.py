"""The batches of a rank: which samples it reads at a step, cut to its part of the ring's layout.

    step 7, dp 2, micro_batch 1, accumulation 2        samples of the step: 12 5 31 8
    ring 0 reads 12, then 31; ring 1 reads 5, then 8   every rank of a ring reads the whole sample and keeps its tokens

Stateless: a step's batches follow from its number. Reading is a slice of a memory map, so there are no workers.
"""

import torch

from mtraining_nns.data.collator import collate
from mtraining_nns.data.guard import batch_fingerprint, told
from mtraining_nns.data.mixture import Mixture
from mtraining_nns.engines.world import World
from mtraining_nns.ops.layout import Layout


class Feed:
    """Batches of one rank from prepared folders; `guard_steps` first calls compare what the ranks of a ring read."""

    def __init__(self, recipe, world: World, layout: Layout):
        self.data, self.train, self.dp, self.batch = Mixture.of(recipe), recipe.train, recipe.parallel.dp, recipe.batch
        self.world, self.layout, self.visits = world, layout, recipe.visits
        self.guarded = recipe.parallel.data_guard_steps if world.ring.world > 1 else 0

    def told(self, step: int) -> str:
        """What a step reads over all ranks, for a message."""
        return told(self.data, self.visits(step))

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """This rank's micro-batches of a step, on its device."""
        micro, turns = self.train.micro_batch, range(self.train.accumulation)
        starts = [step * self.batch + (turn * self.dp + self.world.dp_rank) * micro for turn in turns]
        read = [[self.data[visit] for visit in range(start, start + micro)] for start in starts]
        tokens = [torch.stack([sequence for sequence, _ in sequences]) for sequences in read]
        if self.guarded > 0:
            self.guarded -= 1
            self.world.at(f"step {step + 1}, comparing what was read")
            check_same_tokens(torch.cat(tokens), self.world, step)
        lengths = [[length for _, length in sequences] for sequences in read]
        return [place(t, self.layout, self.world, lengths=n) for t, n in zip(tokens, lengths)]


def place(tokens: torch.Tensor, layout: Layout, world: World, *, lengths=None) -> dict[str, torch.Tensor]:
    """This rank's part of whole sequences [B, S], on its device; lengths: as for `collate`."""
    return {key: x.to(world.device) for key, x in collate(tokens, layout, world.ring.rank, lengths).items()}


def check_same_tokens(tokens: torch.Tensor, world: World, step: int) -> None:
    """RuntimeError, naming the ranks, unless all ranks of a ring read the same tokens. Collective in the ring."""
    mine = torch.tensor([batch_fingerprint(tokens)], device=world.device)
    prints = [part.item() for part in world.ring.gather(mine)]
    odd = [rank for rank, value in zip(world.ring.ranks, prints) if value != prints[0]]
    if odd:
        raise RuntimeError(
            f"step {step}: ranks {odd} read other tokens than rank {world.ring.ranks[0]} of the same ring;"
            " the folders of data must hold the same files on every machine"
        )
