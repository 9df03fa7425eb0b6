"""The whole answer of `mtraining plan`: the recipe as it stands, then its other settings or the table of rings."""

import json
from dataclasses import dataclass

import torch

from mtraining_nns.errors import UserError
from mtraining_nns.model import build_model, check_layers, config_of
from mtraining_nns.plan import report, scaling
from mtraining_nns.plan.candidates import candidates
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.estimate import Estimate
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe, check_folders

DENSITY = 0.05
PAPER = f"assumed: {1 - DENSITY:.0%} sparsity, as in the paper at 512K tokens; shorter texts keep more"


@dataclass(frozen=True)
class Planner:
    """density_source: where the density comes from, for the output; indices: (length, recorded ones) or ()."""

    recipe: Recipe
    shape: Shape
    constants: Constants
    density: float
    density_source: str
    indices: tuple = ()

    @classmethod
    def of(cls, recipe: Recipe, constants: Constants, density: float | None, recording: str | None) -> "Planner":
        """recipe: shared by its GPUs. UserError for a model that cannot be read or that the adapter refuses."""
        if recipe.parallel.zero < 2:
            raise UserError(
                f"parallel.zero={recipe.parallel.zero} is nnScaler's own, a plan knows 2 and 3 of the torch engine;"
                " give parallel.zero=2"
            )
        shape = shape_of(recipe)
        if recipe.attention.pattern == "moba" and density is None and recording is None:
            attention, length = recipe.attention, recipe.train.seq_len
            return cls(recipe, shape, constants, moba_density(attention, length), "top_k chunks of each query")
        if recording is None:
            source = PAPER if density is None else "as given (--density)"
            return cls(recipe, shape, constants, DENSITY if density is None else density, source)
        if density is not None:
            raise UserError("--indices have a density of their own; leave --density or --indices out")
        from mtraining_nns.recording import Recording

        found = Recording.load(recording)
        indices = list(found.indices.values())
        kept = sum(index.density(found.seq_len).item() for index in indices) / len(indices)
        source = f"recorded on {found.seq_len} tokens ({recording})"
        return cls(recipe, shape, constants, kept, source, (found.seq_len, indices))

    def estimate(self) -> Estimate:
        """The recipe as it stands."""
        setting = Setting.of(self.recipe, self.shape, self.constants, self.density)
        return Estimate.of(setting, self.constants, self.indices)

    def text(self, *, table: bool) -> str:
        """For people."""
        estimate = self.estimate()
        parts = [report.head(self.shape, self.constants, estimate, self.density_source), report.body(estimate)]
        parts.append(self._table() if table else report.ways(self._candidates()))
        return "\n\n".join([*parts, report.assumed(self.constants)])

    def json(self, *, table: bool) -> str:
        """The same for programs."""
        found = {
            "parameters": self.shape.parameters,
            "density": {"sparse_layers": self.density, "source": self.density_source},
            "recipe": self.estimate().as_dict(),
            "constants": self.constants.as_dict(),
        }
        if table:
            found["table"] = [
                {
                    "gpus": row.world,
                    "tokens_per_s": {way: step.tokens_per_s for way, step in row.steps.items()},
                    "times_faster_than": {way: row.speedup(way) for way in row.steps},
                }
                for row in self._rows()
            ]
        else:
            others = self._candidates()
            found["fitting"] = [estimate.as_dict() for estimate in others.fitting]
            found["refused"] = others.refused
        return json.dumps(found, indent=2)

    def _candidates(self):
        world = self.recipe.parallel.cp * self.recipe.parallel.dp
        return candidates(self.recipe, self.shape, self.constants, world=world, density=self.density)

    def _rows(self):
        return scaling.rows(self.recipe, self.shape, self.constants, self.density)

    def _table(self) -> str:
        return f"one sequence of {self.recipe.train.seq_len} tokens on all GPUs\n{scaling.table(self._rows())}"


def shape_of(recipe: Recipe) -> Shape:
    """Sizes of a recipe's model, built without memory."""
    check_folders(recipe)
    config = config_of(recipe)
    check_layers(recipe.attention, config)
    try:
        return Shape.of(build_model(config, seed=None))
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


def moba_density(attention, seq_len: int) -> float:
    """Kept pairs over causal pairs where every query takes `top_k` chunks, its own up to itself."""
    rows = torch.arange(seq_len)
    earlier = (rows // attention.chunk).clamp_max(attention.top_k - 1) * attention.chunk
    return (rows % attention.chunk + 1 + earlier).sum().item() / (seq_len * (seq_len + 1) / 2)
