"""One way to run a recipe: a model on so many GPUs, with every key of the recipe that costs memory or time.

setting = Setting.of(recipe.shared_by(32), shape, constants, density=0.05)
setting.tokens                  of a micro-batch on a rank
setting.ring                    "4 x 8, gathered"
"""

from dataclasses import dataclass

import torch

from mtraining_nns.errors import UserError
from mtraining_nns.ops import kernels
from mtraining_nns.ops.attention import PATTERNS
from mtraining_nns.ops.layout import Layout
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe
from mtraining_nns.topology import inner_mode, ring_shape

BYTES = {"bf16": 2, "fp32": 4}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """recipe: shared by `world` processes; node: GPUs of a machine; density: kept over causal pairs of a sparse layer.

    UserError where the recipe's ring does not fit the machines.
    """

    recipe: Recipe
    shape: Shape
    world: int
    node: int
    backend: str
    density: float

    @classmethod
    def of(cls, recipe: Recipe, shape: Shape, constants: Constants, density: float) -> "Setting":
        """On GPUs of a kind, with the backend that their operator would choose if its packages are installed."""
        world = recipe.parallel.cp * recipe.parallel.dp
        given = {"recipe": recipe, "shape": shape, "world": world, "node": constants.gpus_per_node, "density": density}
        config, setting = recipe.attention, cls(**given, backend="triton")
        work = kernels.Work(
            block=config.block,
            deterministic=config.deterministic,
            dense=setting.dense_layers == shape.layers,
            row_bits=PATTERNS[config.pattern].ROW_BITS and setting.dense_layers < shape.layers,
            queries=setting.layout.local_len,
            head_dim=shape.head_dim,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dtype=DTYPES[recipe.train.precision],
        )
        kind = "cuda" if constants.capability >= (1, 0) else "cpu"
        try:
            backend, _ = kernels.choose(
                kernels.Device(type=kind, capability=constants.capability), work, config.backend
            )
        except ValueError as error:
            raise UserError(f"on {constants.gpu}: {error}") from error
        return cls(**given, backend=backend)

    def __post_init__(self):
        nodes = [f"machine {rank // self.node}" for rank in range(self.world)]
        inner = ring_shape(self.parallel, nodes).inner
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "mode", inner_mode(self.parallel, inner, nodes))

    @property
    def train(self):
        return self.recipe.train

    @property
    def parallel(self):
        return self.recipe.parallel

    @property
    def attention(self):
        return self.recipe.attention

    @property
    def cp(self) -> int:
        return self.parallel.cp

    @property
    def element_bytes(self) -> int:
        """Of activations and gathered weights."""
        return BYTES[self.train.precision]

    @property
    def layout(self) -> Layout:
        return Layout.of(self.attention, self.train.seq_len, self.cp, self.inner)

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank, padding included."""
        return self.train.micro_batch * self.layout.local_len

    @property
    def step_tokens(self) -> int:
        """Of an optimizer step, over all ranks."""
        return self.recipe.batch * self.train.seq_len

    @property
    def within(self) -> int:
        """Ranks of an inner circle: of a node where the ring has two levels or lies in one, else the whole ring."""
        return self.inner or self.cp

    @property
    def leaves_node(self) -> bool:
        """Whether hops of an inner circle cross machines."""
        return self.inner is None and self.cp > self.node

    @property
    def ring(self) -> str:
        if self.cp == 1:
            return "none"
        shape = "flat" if self.inner is None else f"{self.cp // self.inner} x {self.inner}"
        return f"{shape}, {'gathered' if self.mode == 'gather' else 'hop by hop'}"

    @property
    def dense_layers(self) -> int:
        """Layers that keep every key."""
        attention = self.attention
        if attention.pattern == "dense" or self.train.seq_len < attention.dense_below:
            return self.shape.layers
        return len(attention.dense_layers)

    @property
    def columns(self) -> int:
        """Most single keys of a sparse layer's head."""
        return PATTERNS[self.attention.pattern].most_columns(self.attention, self.train.seq_len)

    @property
    def kept(self) -> float:
        """Kept pairs over causal pairs, mean over all layers."""
        dense = self.dense_layers / self.shape.layers
        return dense + (1 - dense) * self.density
