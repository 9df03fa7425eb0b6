"""The model of recipes/custom_model, and some that cannot be cut along the tokens, or not be traced."""

import sys
from pathlib import Path

import torch

from mtraining_nns import nnscaler_ops

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "custom_model"))
from model import Custom  # noqa: E402


class Begun(Custom):
    """Everything behind the embedding."""

    def rest(self, x, samples):
        for layer in self.layers:
            x = layer(x)
        return nnscaler_ops.linear_cross_entropy(x, self.head.weight, samples["labels"])


class Mixing(Begun):
    """Mixes tokens outside attention, which no cut along the tokens can follow."""

    def forward(self, samples):
        x = self.words(samples["input_ids"])
        x = x * x.softmax(dim=1)
        return self.rest(x, samples)


class Unknown(Begun):
    """Calls an operator that nnScaler has no annotation for."""

    def forward(self, samples):
        x = self.words(samples["input_ids"]).unflatten(-1, (-1, 2)).flatten(2)
        return self.rest(x, samples)


class Numbered(Begun):
    """Counts positions, where the ring's order has others."""

    def forward(self, samples):
        x = self.words(samples["input_ids"])
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        return self.rest(x, samples)


class Looking(Custom):
    """Looks at a value, which a trace has not."""

    def forward(self, samples):
        x = self.words(samples["input_ids"])
        if x.mean() > 0:
            x = -x
        return nnscaler_ops.linear_cross_entropy(x, self.head.weight, samples["labels"])
