"""The paper's comparison (figure 6b), predicted: five ways of attention on rings of 8 to 128 GPUs, one sequence.

    dense       every pair, zigzag, flat ring          zigzag      vertical-slash, zigzag, flat ring
    xattention  zigzag, flat ring                      striped     vertical-slash, striped, flat ring
                                                       two levels  the same, hierarchical ring

Rings go hop by hop, as the paper's do; memory is not asked about.
"""

from dataclasses import dataclass, replace

from mtraining_nns.errors import UserError
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.shape import Shape
from mtraining_nns.plan.times import StepTime, step_time
from mtraining_nns.recipe import Recipe
from mtraining_nns.tables import align

WORLDS = (8, 16, 32, 64, 128)
WAYS = {  # pattern, layout, ring
    "dense": ("dense", "zigzag", "flat"),
    "xattention": ("xattention", "zigzag", "flat"),
    "zigzag": ("vertical_slash", "zigzag", "flat"),
    "striped": ("vertical_slash", "striped", "flat"),
    "two levels": ("vertical_slash", "striped", "hierarchical"),
}
PAPER = {"dense": "up to 6", "zigzag": "2.1", "striped": "1.3"}  # times faster is MTraining, 32 A100-40GB, 512K


@dataclass(frozen=True)
class Row:
    """Predicted steps of one ring, by way."""

    world: int
    steps: dict[str, StepTime]

    def speedup(self, way: str) -> float:
        """How many times faster the hierarchical striped ring is."""
        return self.steps[way].seconds / self.steps["two levels"].seconds


def rows(recipe: Recipe, shape: Shape, constants: Constants, density: float, worlds=WORLDS) -> list[Row]:
    """Of all rings that the sequence can be shared by."""
    found = []
    for world in worlds:
        try:
            steps = {way: _step(recipe, shape, constants, density, world, *keys) for way, keys in WAYS.items()}
        except UserError:
            continue  # shorter than a stripe a rank
        found.append(Row(world, steps))
    return found


def table(found: list[Row]) -> str:
    """tokens/s of every way, then how many times faster the last one is."""
    ways = list(WAYS)
    lines = [["GPUs", *(f"{way} tok/s" for way in ways), *(f"x {way}" for way in ways[:-1])]]
    for row in found:
        speeds = [f"{row.steps[way].tokens_per_s:,.0f}" for way in ways]
        lines.append([str(row.world), *speeds, *(f"{row.speedup(way):.2f}" for way in ways[:-1])])
    lines.append(["paper, 32", *([""] * len(ways)), *(PAPER.get(way, "") for way in ways[:-1])])
    return align(lines)


def _step(recipe: Recipe, shape: Shape, constants: Constants, density: float, world: int, *keys: str) -> StepTime:
    pattern, layout, ring = keys
    within = world <= constants.gpus_per_node
    parallel = replace(recipe.parallel, cp=world, dp=1, inner=None, inner_mode="ring", ring="flat" if within else ring)
    changed = replace(
        recipe,
        parallel=parallel,
        attention=replace(recipe.attention, pattern=pattern, layout=layout),
        train=replace(recipe.train, micro_batch=1, accumulation=recipe.batch),
    )
    return step_time(Setting.of(changed.shared_by(world), shape, constants, density), constants)
