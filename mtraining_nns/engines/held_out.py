"""Loss on held-out text with the weights in training, under the sparse operator or a dense one, whole and by position.

Both on the same weights and the same ring: their difference is what the left-out keys cost. Positions are those in a
sequence; only where it is one long document do they tell what a longer context brings.
"""

from dataclasses import replace

import torch

from mtraining_nns import hf
from mtraining_nns.data.dataset import PackedDataset
from mtraining_nns.engines.feed import place
from mtraining_nns.engines.step import sharded_modules
from mtraining_nns.engines.world import World, layout_of
from mtraining_nns.errors import UserError
from mtraining_nns.eval.perplexity import bucket_edges
from mtraining_nns.loss import IGNORE
from mtraining_nns.model import CausalLMLoss
from mtraining_nns.needles import Needle, values
from mtraining_nns.ops.attention import Operator

MOST_SEQUENCES = 64  # of the held-out text


class PositionSums:
    """Losses and valid tokens of sequences of one length, by the position of the token that is predicted."""

    def __init__(self, seq_len: int, device: torch.device):
        self.edges = bucket_edges(seq_len)
        self.begins = torch.tensor([begin for begin, _ in self.edges], device=device)
        self.sums = torch.zeros(2, len(self.edges), dtype=torch.float64, device=device)

    def add(self, losses: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> None:
        """losses fp32 and labels [B, S] of tokens at positions [B, S]; a token predicts the one after it."""
        valid = labels != IGNORE
        bucket = torch.bucketize(positions[valid] + 1, self.begins, right=True) - 1
        found = torch.stack([losses[valid].double(), torch.ones_like(losses[valid], dtype=torch.float64)])
        self.sums.index_add_(1, bucket, found)

    def scalars(self, name: str, world: World) -> dict[str, float]:
        """Mean losses by tag, over the tokens of all ranks. Collective."""
        losses, counts = world.sum(self.sums).tolist()
        found = {f"eval/loss_{name}": sum(losses) / sum(counts)}
        for (begin, _), loss, count in zip(self.edges, losses, counts, strict=True):
            if count:
                found[f"eval_by_position/{name}_from_{begin:07d}"] = loss / count
        return found


def evaluate(model: CausalLMLoss, operator: Operator, recipe, world: World) -> dict[str, float]:
    """Scalars of data.eval_path, dense, and sparse unless the recipe is dense. Collective."""
    operators = {"dense": dense_operator(operator, world)}
    if recipe.attention.pattern != "dense":
        operators["sparse"] = operator
    dataset = PackedDataset(recipe.data.eval_path, recipe.train.seq_len)
    model.eval()
    found = {}
    for name, chosen in operators.items():
        hf.attach(model.lm, chosen)
        found |= _sums(model, dataset, recipe, world).scalars(name, world)
    hf.attach(model.lm, operator)
    for module in sharded_modules(model):  # no backward pass comes that would free the gathered weights
        module.reshard()
    return found


@torch.no_grad()
def find_needles(model: CausalLMLoss, found: list[Needle], recipe, world: World) -> dict[str, float]:
    """Scalars of needles under the operator in training. Collective."""
    layout, dp = layout_of(recipe, world.ring), recipe.parallel.dp
    losses = torch.zeros(len(found), dtype=torch.float64, device=world.device)
    model.eval()
    with hf.sequence(model.lm, seq_len=recipe.train.seq_len):
        for first in range(0, len(found), dp):
            number = first + world.dp_rank
            needle = found[min(number, len(found) - 1)]
            batch = place(needle.tokens.unsqueeze(0), layout, world)
            needle.only_answer(batch)
            loss = model(**batch)
            if number < len(found):  # a ring without a needle of its own still takes part in gathering the weights
                losses[number] += loss
    for module in sharded_modules(model):
        module.reshard()
    return values(found, world.sum(losses).tolist())


def check_held_out(recipe, trained: dict) -> None:
    """UserError before the first step, not after the last, for held-out data that the run cannot read.

    trained: manifest of the data that the run trains on.
    """
    held_out = PackedDataset(recipe.data.eval_path, recipe.train.seq_len).manifest
    if held_out["vocab_size"] != trained["vocab_size"]:
        raise UserError(
            f"data.eval_path has a vocabulary of {held_out['vocab_size']}, the data to train on of"
            f" {trained['vocab_size']};"
            " prepare both with the same tokenizer"
        )


def dense_operator(operator: Operator, world: World) -> Operator:
    """The same layout, ring and backend with every key kept."""
    return Operator(replace(operator.config, pattern="dense"), world.ring, world.device.type)


@torch.no_grad()
def _sums(model, dataset: PackedDataset, recipe, world: World) -> PositionSums:
    """This rank's part."""
    layout, dp = layout_of(recipe, world.ring), recipe.parallel.dp
    used = min(len(dataset), MOST_SEQUENCES)
    sums = PositionSums(recipe.train.seq_len, world.device)
    with hf.sequence(model.lm, seq_len=recipe.train.seq_len):
        for first in range(0, used, dp):
            index = first + world.dp_rank
            tokens, length = dataset.padded(min(index, used - 1))
            batch = place(tokens.unsqueeze(0), layout, world, lengths=[length])
            if index >= used:  # a ring without a sample of its own still takes part in gathering the weights
                batch["labels"].fill_(IGNORE)
            sums.add(model(**batch, by_token=True), batch["labels"], batch["position_ids"])
    return sums
