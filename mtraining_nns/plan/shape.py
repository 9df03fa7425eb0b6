"""The sizes of a model that cost memory and time, read from a model without weights.

shape = Shape.of(build_model(config_of(recipe), seed=None))
shape.parameters                     3085938688 for Qwen2.5-3B
shape.sharded(32)                    elements of its weights on the fullest of 32 ranks
"""

import math
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a causal LM whose decoder layers are alike.

    layer_weights, root_weights: the shapes of the weights of one layer and of all that is in no layer, tied ones once.
    linear: weights of a layer that are one side of a matrix product.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    linear: int
    layer_weights: tuple[tuple[int, ...], ...]
    root_weights: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, lm: nn.Module) -> "Shape":
        """Of a transformers causal LM, sharded or not, with memory or without."""
        config, layers = lm.config, lm.model.layers
        in_layers = {id(p) for p in layers.parameters()}
        linear = [module.weight.numel() for module in layers[0].modules() if isinstance(module, nn.Linear)]
        return cls(
            layers=len(layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=layers[0].self_attn.head_dim,
            vocabulary=config.vocab_size,
            tied=lm.lm_head.weight is lm.get_input_embeddings().weight,
            linear=sum(linear),
            layer_weights=tuple(tuple(p.shape) for p in layers[0].parameters()),
            root_weights=tuple(tuple(p.shape) for p in lm.parameters() if id(p) not in in_layers),
        )

    @property
    def layer_parameters(self) -> int:
        return sum(map(math.prod, self.layer_weights))

    @property
    def root_parameters(self) -> int:
        return sum(map(math.prod, self.root_weights))

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def sharded(self, world: int) -> int:
        """Elements on the fullest rank: FSDP cuts each weight along its first dim, into equal parts rounded up."""
        return self.sharded_layers(world) + _sharded(self.root_weights, world)

    def sharded_layers(self, world: int) -> int:
        """The same without embedding, head and final norm."""
        return self.layers * _sharded(self.layer_weights, world)


def _sharded(weights, world: int) -> int:
    return sum(-(-rows // world) * math.prod(rest) for rows, *rest in weights)
