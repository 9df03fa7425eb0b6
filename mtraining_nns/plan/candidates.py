"""Every way to run a recipe on so many GPUs, the fastest that fits first, and why the others do not.

    found = candidates(recipe, shape, constants, world=32, density=0.05)
    found.fitting[0].name, found.refused[0]

Context parallelism, its ring, ZeRO, moments and layer inputs in host memory, and recomputation are tried; the sequences
of a step stay as many as the recipe says, by another `train.accumulation`. Everything else is the recipe's.
"""

import itertools
from dataclasses import dataclass, replace

from mtraining_nns.errors import UserError
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.estimate import Estimate
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe

# recompute, offload_inputs, keep_output
ACTIVATIONS = ((False, False, False), (True, False, True), (True, False, False), (True, True, False))


@dataclass(frozen=True)
class Candidates:
    """fitting: fastest first; refused: a line each."""

    fitting: list[Estimate]
    refused: list[str]


def candidates(recipe: Recipe, shape: Shape, constants: Constants, *, world: int, density: float) -> Candidates:
    """Of all divisors of `world` as cp. UserError where not even one of them can run the recipe."""
    fitting, refused = [], {}
    for cp in (n for n in range(1, world + 1) if world % n == 0):
        try:
            split = _split(recipe, cp, world)
        except UserError as error:
            refused[f"cp {cp} x dp {world // cp}: {error}"] = None
            continue
        for ring, zero, offload, activations in itertools.product(
            ("flat", "hierarchical"), (2, 3), (False, True), ACTIVATIONS
        ):
            if ring == "hierarchical" and (cp <= constants.gpus_per_node or cp % constants.gpus_per_node):
                continue
            changed = _changed(split, ring, zero, offload, activations)
            estimate = Estimate.of(Setting.of(changed, shape, constants, density), constants)
            if estimate.fits:
                fitting.append(estimate)
            else:
                refused[f"{estimate.name}: {estimate.reason}"] = None
    if not fitting and not refused:
        raise UserError(f"no ring divides {world} GPUs; give another --gpus")
    return Candidates(sorted(fitting, key=lambda estimate: -estimate.time.tokens_per_s), list(refused))


def _split(recipe: Recipe, cp: int, world: int) -> Recipe:
    dp = world // cp
    rows = dp * recipe.train.micro_batch
    if recipe.batch % rows:
        raise UserError(f"{recipe.batch} sequences a step cannot be shared by {dp} rings of {recipe.train.micro_batch}")
    parallel = replace(recipe.parallel, cp=cp, dp=dp, ring="auto", inner=None)
    train = replace(recipe.train, accumulation=recipe.batch // rows)
    return replace(recipe, parallel=parallel, train=train).shared_by(world)


def _changed(recipe: Recipe, ring: str, zero: int, offload: bool, activations: tuple[bool, bool, bool]) -> Recipe:
    recompute, offload_inputs, keep_output = activations
    return replace(
        recipe,
        parallel=replace(recipe.parallel, ring=ring, zero=zero, offload=offload),
        train=replace(recipe.train, recompute=recompute, offload_inputs=offload_inputs),
        attention=replace(recipe.attention, keep_output=keep_output),
    )
