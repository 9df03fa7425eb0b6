"""Real optimizer steps of a model with random weights at random tokens, through the torch engine's own code.

    found = run(recipe, config, world)
    found.seconds["attention backward"], found.peaks["backward"], found.kept

Nothing is read from disk: the recipe's data and weights need not exist. Random weights keep other keys than a trained
model's, so budgets are fixed (`of_density`) and what was kept is counted.
"""

from dataclasses import dataclass, replace

import torch

from mtraining_nns import flops, hf
from mtraining_nns.engines.feed import place
from mtraining_nns.engines.step import shard, train_step
from mtraining_nns.engines.world import World, layout_of
from mtraining_nns.model import CausalLMLoss, build_model, materialize
from mtraining_nns.ops import clock
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.optim import build_optimizer
from mtraining_nns.plan import ring_time
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe


@dataclass(frozen=True)
class Trial:
    """seconds: of the timed step by name, the slowest rank's; peaks: bytes of tensors by moment, none on a CPU.

    kept: pairs over causal pairs, of all layers; reserved_bytes: what the allocator took.
    """

    shape: Shape
    seconds: dict[str, float]
    peaks: dict[str, int]
    kept: float
    reserved_bytes: int


def run(recipe: Recipe, config, world: World, *, warmup: int = 1) -> Trial:
    """`warmup` steps and a timed one of a resolved recipe. Collective."""
    model, operator, optimizer = build(recipe, config, world)
    shape, peaks = Shape.of(model.lm), _Peaks(world.device)
    for step in range(warmup + 1):
        batches = random_batches(recipe, config.vocab_size, world, step)
        if step == warmup:
            peaks.watch(model, optimizer)
            with clock.running(world.device) as found:
                train_step(model, optimizer, batches, world, recipe=recipe, step=step)
            peaks.mark("update")
        else:
            train_step(model, optimizer, batches, world, recipe=recipe, step=step)
    seconds = found.seconds()
    names = sorted(seconds)
    slowest = world.max(torch.tensor([seconds[name] for name in names], dtype=torch.float64, device=world.device))
    pairs = torch.tensor([float(sum(operator.read_stats()["work"].values()))], dtype=torch.float64, device=world.device)
    rings = recipe.parallel.dp * recipe.train.micro_batch
    kept = world.sum(pairs).item() / (rings * flops.causal_pairs(shape, recipe.train.seq_len))
    reserved = torch.cuda.max_memory_reserved(world.device) if world.device.type == "cuda" else 0
    return Trial(shape, dict(zip(names, slowest.tolist())), peaks.bytes, kept, reserved)


def build(recipe: Recipe, config, world: World):
    """(model, operator, optimizer) on the device of this rank, weights drawn there."""
    lm = build_model(config, seed=None)
    model = CausalLMLoss(lm, chunk=recipe.train.loss_chunk)
    operator = Operator(recipe.attention, world.ring, world.device.type)
    hf.attach(lm, operator, getattr(torch, recipe.model.dtype))
    shard(model, recipe, world)
    materialize(lm, world.device)
    torch.manual_seed(recipe.train.seed)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            local = parameter.to_local()
            if parameter.ndim > 1:
                local.normal_(std=0.02)
            else:
                local.fill_(0.0 if name.endswith("bias") else 1.0)
    return model, operator, build_optimizer(model, recipe.train, offload=recipe.parallel.offload)


def random_batches(recipe: Recipe, vocabulary: int, world: World, step: int) -> list[dict]:
    """Micro-batches of this rank, the same on all ranks of a ring."""
    g = torch.Generator().manual_seed(1000 * step + world.dp_rank)
    shape, layout = (recipe.train.micro_batch, recipe.train.seq_len), layout_of(recipe, world.ring)
    turns = range(recipe.train.accumulation)
    return [place(torch.randint(vocabulary, shape, generator=g), layout, world) for _ in turns]


def of_density(config: AttentionConfig, seq_len: int, density: float) -> AttentionConfig:
    """The settings with fixed budgets that keep about `density` of the causal pairs, dense for 1."""
    if density >= 1:
        return replace(config, pattern="dense")
    kept = ring_time.of_density(seq_len, config.block, density)
    bins = max(1, round(seq_len / config.block * (density * 5 / 6 - 2 * kept.local / seq_len) / 2))
    return replace(
        config,
        pattern="vertical_slash",
        budget="fixed",
        k_v=max(1, kept.columns),
        cap=max(1, kept.columns),
        k_s=bins,
        sinks=kept.sinks,
        local=kept.local,
    )


class _Peaks:
    """Most bytes that tensors held on a GPU: forward with the loss, backward, update."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, {}

    def watch(self, model, optimizer) -> None:
        if self.device.type != "cuda":
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        model.register_forward_hook(lambda *args: self.mark("forward"))
        optimizer.register_step_pre_hook(lambda *args: self.mark("backward"))

    def mark(self, name: str) -> None:
        if self.device.type != "cuda":
            return
        peak = torch.cuda.max_memory_allocated(self.device)
        self.bytes[name] = max(peak, self.bytes.get(name, 0))
        torch.cuda.reset_peak_memory_stats(self.device)
