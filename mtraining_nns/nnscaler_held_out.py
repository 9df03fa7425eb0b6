"""Held-out losses and needles of the nnScaler engine, and the samples that its graph takes.

Every rank of a ring gets the ring's sums from `infer_step`. All of it is collective.
"""

from typing import NamedTuple

import torch

from mtraining_nns import nnscaler_ops
from mtraining_nns.data.collator import IGNORED_LABEL, collate_ring
from mtraining_nns.data.dataset import PackedDataset
from mtraining_nns.engines.held_out import MOST_SEQUENCES, PositionSums
from mtraining_nns.engines.world import World
from mtraining_nns.needles import Needle, values
from mtraining_nns.ops.layout import Layout
from mtraining_nns.recipe import Recipe


class Place(NamedTuple):
    """What a run is, where this rank stands in it, and how its rings share a sequence."""

    recipe: Recipe
    world: World
    layout: Layout


def sample(tokens: torch.Tensor, layout: Layout, length: int | None = None) -> dict[str, torch.Tensor]:
    """One sequence as the graph takes it: int64 [layout.padded_len] each, and count, its valid labels.

    length: how many of the tokens are text, all by default.
    """
    lengths = None if length is None else [length]
    found = {name: x[0] for name, x in collate_ring(tokens[None], layout, lengths).items()}
    return found | {"count": (found["labels"] != IGNORED_LABEL).sum()}


def _ignored(one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A sample that adds nothing to any sum."""
    return one | {"labels": torch.full_like(one["labels"], IGNORED_LABEL), "count": torch.zeros_like(one["count"])}


@torch.no_grad()
def evaluate(trainer, place: Place) -> dict[str, float]:
    """Scalars of data.eval_path, dense, and sparse unless the recipe is dense."""
    names = {"dense": {"pattern": "dense"}}
    if place.recipe.attention.pattern != "dense":
        names["sparse"] = {}
    trainer.model.eval()
    found = {}
    for name, changes in names.items():
        with nnscaler_ops.changed(**changes):
            found |= _sums(trainer, place).scalars(name, place.world)
    return found


@torch.no_grad()
def find_needles(trainer, place: Place, found: list[Needle]) -> dict[str, float]:
    """Scalars of needles under the operator in training."""
    recipe, world, layout = place
    losses = torch.zeros(len(found), dtype=torch.float64, device=world.device)
    trainer.model.eval()
    for first in range(0, len(found), recipe.parallel.dp):
        number = first + world.dp_rank
        needle = found[min(number, len(found) - 1)]
        one = sample(needle.tokens, layout)
        needle.only_answer(one)
        loss, _ = _infer(trainer, place, [one] + [_ignored(one)] * (recipe.train.micro_batch - 1))
        if number < len(found):
            losses[number : number + 1] += loss.double()
    return values(found, (world.sum(losses) / world.ring.world).tolist())


def _sums(trainer, place: Place) -> PositionSums:
    """This rank's part."""
    recipe, world, layout = place
    data, dp, micro = (
        PackedDataset(recipe.data.eval_path, recipe.train.seq_len),
        recipe.parallel.dp,
        recipe.train.micro_batch,
    )
    used, sums = min(len(data), MOST_SEQUENCES), PositionSums(recipe.train.seq_len, world.device)
    positions = layout.positions(world.ring.rank, world.device)
    for first in range(0, used, dp * micro):
        batch = []
        for index in range(first + world.dp_rank * micro, first + (world.dp_rank + 1) * micro):
            tokens, length = data.padded(min(index, used - 1))
            one = sample(tokens, layout, length)
            # a replica without a sequence of its own computes along
            batch.append(one if index < used else _ignored(one))
        with nnscaler_ops.token_losses() as kept:
            _infer(trainer, place, batch)
        for losses, labels in kept:
            sums.add(losses, labels, positions.expand_as(labels))
    return sums


def _infer(trainer, place: Place, batch: list[dict]):
    """(summed loss, valid tokens of each sequence) of a micro-batch of samples."""
    whole = {name: torch.stack([one[name] for one in batch]).to(place.world.device) for name in batch[0]}
    (found,) = trainer.model.infer_step([whole])
    return found
