"""Where a step's first NaN or infinity stands, looked for after the step and before its update.

    weights            one that is not finite came from the update before
    forward pass       run again without gradients: the first module whose output is not finite, micro-batch by
                       micro-batch; all ranks run it, and the earliest place over all of them counts
    gradients          as the step left them: a backward pass goes from the loss down, so the last weight in the model's
                       order is where it began

Costs nothing while all is finite. A forward pass that is finite the second time says that the fault does not repeat.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mtraining_nns import hf
from mtraining_nns.engines.world import World
from mtraining_nns.model import CausalLMLoss


def first_not_finite(model: CausalLMLoss, batches: list[dict], world: World, *, recipe, step: int) -> str:
    """The first place of a step, in words, the same on all ranks. Collective over all ranks."""
    named = [(name.removeprefix("lm."), p) for name, p in model.named_parameters()]
    weight = first_weight(named, world)
    if weight:
        return weight
    torch.manual_seed(recipe.train.seed + step)
    with hf.sequence(model.lm, seq_len=recipe.train.seq_len):
        place = _first_output(model, batches)
    if place:
        return f"first not finite: {place}"
    return f"{first_gradient(named, world)}; the forward pass, run again, is finite"


def first_weight(named: list[tuple[str, torch.nn.Parameter]], world: World) -> str:
    """The first weight that is not finite, in words, "" for none; named: in the model's order. Collective."""
    bad = _bad_names([(name, p.detach()) for name, p in named], world)
    return f"first not finite: weight {bad[0]}, and {len(bad) - 1} of {len(named) - 1} others" if bad else ""


def first_gradient(named: list[tuple[str, torch.nn.Parameter]], world: World) -> str:
    """The first gradient that is not finite, in words; named: in the model's order. Collective."""
    bad = _bad_names([(name, p.grad) for name, p in named], world)
    if not bad:
        return "each gradient is finite: their norm overflowed, or the fault does not repeat"
    return f"first not finite: gradient of {bad[-1]}, nearest to the loss of {len(bad)} of {len(named)} gradients"


def _bad_names(named: list[tuple[str, torch.Tensor | None]], world: World) -> list[str]:
    """Names whose tensor is not finite on some rank; None is finite."""
    flags = [torch.zeros((), device=world.device) if x is None else _not_finite(x) for _, x in named]
    return [name for (name, _), flag in zip(named, world.max(torch.stack(flags)).tolist()) if flag]


@torch.no_grad()
def _first_output(model: CausalLMLoss, batches: list[dict]) -> str:
    """The first module of a repeated forward pass with an output that is not finite on some rank, "" for none."""
    calls, flags = [], []

    def watch(name: str):
        def hook(module, args, output) -> None:
            calls.append(name)
            flags.append(torch.stack([_not_finite(x) for x in _tensors(output)] or [torch.zeros(())]).amax())

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    model.eval()
    ends = []
    try:
        for batch in batches:
            model(**batch)
            ends.append(len(calls))
    finally:
        for hook in hooks:
            hook.remove()
    bad = torch.stack([flag.to(flags[-1].device) for flag in flags]).tolist()
    found = next((number for number, flag in enumerate(bad) if flag), len(calls))
    ranks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    first = min(ranks)
    if first == len(calls):
        return ""
    where = ", ".join(str(rank) for rank, number in enumerate(ranks) if number == first)
    turn = next(turn for turn, end in enumerate(ends) if first < end)
    name = f"output of {calls[first].removeprefix('lm.')}" if calls[first] else "the loss"
    return f"{name} on ranks {where}, micro-batch {turn + 1} of {len(batches)}"


def _not_finite(x: torch.Tensor) -> torch.Tensor:
    """1.0 where this rank's part of a tensor holds NaN or infinity, fp32 scalar on its device."""
    local = x.to_local() if isinstance(x, DTensor) else x
    return (~local.isfinite()).any().float()


def _tensors(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [x for part in parts for x in _tensors(part)]
