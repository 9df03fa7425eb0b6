"""AdamW, the learning rate of a step, and the norm of gradients that are sharded over all ranks.

Learning rate of 10 steps, warmup_steps 2, lr 1, min_lr_ratio 0.1:

    step  0    1    2    3    4    5    6    7    8    9
    lr    0.5  1.0  1.0  0.97 0.87 0.72 0.55 0.38 0.23 0.13     the cosine would reach 0.1 at step 10

It is a pure function of the step, so a resumed run needs no saved schedule.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mtraining_nns.host_adamw import MOMENTS, HostAdamW


def learning_rate(step: int, train) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then a cosine to lr * min_lr_ratio."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)


def build_optimizer(model, train, *, offload: bool = False) -> torch.optim.AdamW:
    """AdamW over the parameters of a model; 1-D ones (norms, biases) are not decayed. Fused kernels on a GPU.

    offload: the moments lie in host memory.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups, settings = [x for x in groups if x["params"]], {"lr": train.lr, "betas": train.betas, "eps": train.eps}
    if offload:
        return HostAdamW(groups, **settings)
    return torch.optim.AdamW(groups, **settings, **({"fused": True} if parameters[0].is_cuda else {"foreach": True}))


def make_room(optimizer: torch.optim.AdamW, step: int) -> None:
    """Zero moments for all weights, to be filled from a checkpoint that was made after `step` updates."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, HostAdamW):
        for parameter in parameters:
            optimizer.make_room(parameter, step=step)
        return
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    # Through load_state_dict the step counters move to where the optimizer's kernels want them.
    optimizer.load_state_dict(optimizer.state_dict())


def set_learning_rate(optimizer, value: float) -> None:
    """The same learning rate for all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(model, limit: float) -> float:
    """Scale the gradients so that their norm is at most `limit`; returns the norm before, of the whole model.

    Sharded gradients (DTensor) are summed over their mesh with one all-reduce, so every rank gets the norm that one
    device would report. All are sharded or none is. With a norm that is not finite they stay as they are.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    sharded = isinstance(parameters[0].grad, DTensor)
    square = get_total_norm([p.grad.to_local() if sharded else p.grad for p in parameters]).square()
    if sharded:
        dist.all_reduce(square, group=parameters[0].grad.device_mesh.get_group())
    clip_grads_with_norm_(parameters, limit, square.sqrt().nan_to_num(0.0, posinf=0.0))
    return square.sqrt().item()
