"""One optimizer step over all ranks, and the sharding that it relies on.

The gradient is that of sum(token losses of all micro-batches and ranks) / their valid tokens, as on one device: the
count is known before the first backward pass, and FSDP adds gradients instead of averaging them.
"""

import math
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mtraining_nns import hf, signals
from mtraining_nns.engines.world import World
from mtraining_nns.errors import UserError
from mtraining_nns.liger import use_liger
from mtraining_nns.loss import IGNORE
from mtraining_nns.model import CausalLMLoss, recompute_layers
from mtraining_nns.ops import clock
from mtraining_nns.optim import clip_gradients

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shard(model: CausalLMLoss, recipe, world: World) -> None:
    """FSDP2 in place: each decoder layer, and the rest as the root. Weights fp32 at rest, `precision` at work.

    ZeRO 3 frees a layer's gathered weights after its forward pass, ZeRO 2 keeps them for the backward pass.
    """
    if recipe.train.offload_inputs and world.device.type == "cpu":
        raise UserError("train.offload_inputs=true is for a GPU, this run has none; leave it out")
    if recipe.train.kernels == "liger":
        use_liger(model.lm, world.device.type)
    if recipe.train.recompute:
        recompute_layers(model.lm, offload_inputs=recipe.train.offload_inputs)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[recipe.train.precision], reduce_dtype=torch.float32)
    for layer in model.lm.model.layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=policy, reshard_after_forward=recipe.parallel.zero == 3)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor


def sharded_modules(model) -> list[FSDPModule]:
    """The parts of a model that FSDP gathers as one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class NotFinite(RuntimeError):
    """A loss or gradient norm that is NaN or infinite."""


@dataclass(frozen=True)
class StepResult:
    """Loss per valid token of the global batch, the gradient norm before clipping, the signal that asks for the end."""

    loss: float
    grad_norm: float
    stop: str = ""


def train_step(model: CausalLMLoss, optimizer, batches: list[dict], world: World, *, recipe, step: int) -> StepResult:
    """Forward, backward and update over this rank's micro-batches. Collective.

    NotFinite on all ranks, before the update, if the loss or the gradient norm is not finite.
    """
    model.train()
    torch.manual_seed(recipe.train.seed + step)
    valid = world.sum(torch.stack([(batch["labels"] != IGNORE).sum() for batch in batches]).sum()).clamp(min=1)
    total = torch.zeros((), dtype=torch.float32, device=world.device)
    with hf.sequence(model.lm, seq_len=recipe.train.seq_len):
        for batch in batches:
            with clock.span("forward"):
                loss = model(**batch)
            with clock.span("backward"):
                (loss / valid).backward()
            total += loss.detach()
    with clock.span("optimizer"):
        sums = world.sum(torch.cat([total[None], world.asked()]))
        return _update(model, optimizer, sums, valid, recipe=recipe, step=step)


def _update(model, optimizer, sums: torch.Tensor, valid: int, *, recipe, step: int) -> StepResult:
    """sums: of the token losses and of `World.asked`, over all ranks; they are read together."""
    norm = clip_gradients(model, recipe.train.clip)
    loss, *stops = torch.cat([sums[:1] / valid, sums[1:]]).tolist()
    result = StepResult(loss, norm, signals.name(stops))
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise NotFinite(f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}")
    optimizer.step()
    optimizer.zero_grad()
    return result
