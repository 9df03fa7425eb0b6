"""AdamW whose moments lie in host memory and pass through the GPU while it updates, a piece of a weight at a time.

    load     m v of piece 0 | piece 1 | piece 2 | ...        three slots of PIECE elements, so memory on the GPU is
    update                  | piece 0 | piece 1 | ...        3 x 2 x 4 x PIECE bytes = 0.4 GB whatever the model
    store                             | piece 0 | ...

8 bytes a weight in and out: 1.5e9 weights of a rank take 12 GB each way. The update is torch's own, element by element,
so the weights are those of torch.optim.AdamW to the bit. Optimizers that compute on the CPU (torchao, DeepSpeed) do not
fit: they want gradients during the backward pass, before they can be clipped.
Use it where moments do not fit; they cost two trips over the host's link a step.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE = 1 << 24  # elements
SLOTS = 3


class HostAdamW(torch.optim.AdamW):
    """torch.optim.AdamW with `exp_avg` and `exp_avg_sq` in pinned host memory; the same state_dict, on the CPU."""

    def __init__(self, params, *, lr: float, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        """One update; returns when the moments are back in host memory."""
        assert closure is None, "gradients are clipped before the update, so nothing is evaluated again"
        streams = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.make_room(parameter, step=0)
                state = self.state[parameter]
                state["step"] += 1
                device = parameter.device
                if device.type == "cuda" and device not in streams:
                    streams[device] = _Stream(device)
                _update(parameter, state, group, streams.get(device))
        for stream in streams.values():
            stream.finish()

    def make_room(self, parameter: torch.Tensor, *, step: int) -> None:
        """Zero moments of a weight after `step` updates, sharded as the weight is."""
        pinned = parameter.is_cuda
        moments = {name: torch.zeros_like(parameter, device="cpu", pin_memory=pinned).detach() for name in MOMENTS}
        self.state[parameter] = {"step": torch.tensor(float(step)), **moments}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take a state_dict of this class or of torch.optim.AdamW; the moments stay in host memory."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            found = state_dict["state"].get(number)
            if found:
                self.make_room(parameter, step=int(found["step"]))
                for name in MOMENTS:
                    self.state[parameter][name].copy_(found[name])


def _update(parameter: torch.Tensor, state: dict, group: dict, stream: "_Stream | None") -> None:
    """One weight, piece by piece."""
    flat = [_flat(x) for x in (parameter, parameter.grad, *(state[name] for name in MOMENTS))]
    for weight, grad, *moments in zip(*(x.split(PIECE) for x in flat), strict=True):
        before = torch.full((), int(state["step"]) - 1.0, device=weight.device)
        with stream.visiting(moments) if stream else nullcontext(moments) as there:
            _adamw(weight, grad, there, before, group)


def _flat(x: torch.Tensor) -> torch.Tensor:
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.detach().view(-1)


def _adamw(weight, grad, moments: list[torch.Tensor], before: torch.Tensor, group: dict) -> None:
    """torch's update of one tensor after as many others."""
    beta1, beta2 = group["betas"]
    implementation = {"fused": True} if weight.is_cuda else {"foreach": True}
    adamw(
        [weight],
        [grad],
        *([moment] for moment in moments),
        [],
        [before],
        **implementation,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _Stream:
    """Moments on their way through one GPU: loads, updates and stores of different pieces at one time."""

    def __init__(self, device: torch.device):
        self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.slots = [torch.empty(2, PIECE, device=device) for _ in range(SLOTS)]
        self.stored: list[torch.cuda.Event | None] = [None] * SLOTS
        self.inward.wait_stream(torch.cuda.current_stream(device))
        self.turn = 0

    @contextmanager
    def visiting(self, moments: list[torch.Tensor]):
        """A piece of both moments on the GPU, which goes back to host memory afterwards."""
        self.turn = (self.turn + 1) % SLOTS
        there = [half[: moments[0].numel()] for half in self.slots[self.turn]]
        if (stored := self.stored[self.turn]) is not None:
            self.inward.wait_event(stored)
        _copy(moments, there, self.inward)
        update = torch.cuda.current_stream()
        update.wait_stream(self.inward)
        yield there
        self.outward.wait_stream(update)
        _copy(there, moments, self.outward)
        self.stored[self.turn] = self.outward.record_event()

    def finish(self) -> None:
        """Wait until all moments are in host memory."""
        self.outward.synchronize()


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor], stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
