"""Which rank is slow. All ranks' steps take equally long, since they wait for each other, so own work is compared.

    torch       reading batches, and the MLP of every layer, forward and recomputed
    nnScaler    the chunked loss: generated code has no modules to look at

Neither waits for another rank, and all ranks do as much of it. On GPUs events measure it, read at logging steps only.
"""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mtraining_nns.engines.world import World
from mtraining_nns.metrics import WARMUP_STEPS, Meter
from mtraining_nns.ops.clock import Clock

LEAST_S = 0.05  # of own work in a step: less is noise
TAG = "speed/slowest_rank_over_median"


class Pace:
    """Seconds of this rank's own work in a step."""

    def __init__(self, device: torch.device):
        self.device = device
        self.begin()

    @contextmanager
    def timed(self):
        """Own work that runs on the device."""
        began = self.clock.now()
        try:
            yield
        finally:
            self._add(began)

    @contextmanager
    def reading(self):
        """Own work of the host."""
        began = time.perf_counter()
        yield
        self.host_s += time.perf_counter() - began

    def watch(self, modules: list[torch.nn.Module]) -> None:
        """Their forward passes count as own work."""
        begun = []
        for module in modules:
            module.register_forward_pre_hook(lambda *_: begun.append(self.clock.now()))
            module.register_forward_hook(lambda *_: self._add(begun.pop()))

    def report(self, world: World) -> tuple[float, int, float]:
        """(slowest over median, the slowest rank, its seconds) of the step that has ended. Collective."""
        seconds = self.host_s + sum(self.clock.seconds().values())
        all_ranks = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=world.device)
        all_ranks[world.rank] = seconds
        times = world.sum(all_ranks).cpu()
        slowest = int(times.argmax())
        middle = times.median().item()
        return (times[slowest].item() / middle if middle > 0 else 1.0), slowest, times[slowest].item()

    def tell(self, step: int, meter: Meter, world: World, slow_factor: float) -> dict[str, float]:
        """How far the slowest rank is behind, by tag; it is named above `slow_factor`, warm-up apart. Collective."""
        ratio, rank, seconds = self.report(world)
        if ratio > slow_factor and seconds > LEAST_S and meter.steps > WARMUP_STEPS:
            slow = f"rank {rank} on {world.nodes[rank]} is slow"
            world.say(f"step {step}: {slow}: {seconds:.3f} s of own work, {ratio:.2f} times the median")
        return {TAG: ratio}

    def begin(self) -> None:
        """A step begins."""
        self.host_s, self.clock = 0.0, Clock(self.device)

    def _add(self, began) -> None:
        self.clock.spans["own work"].append((began, self.clock.now()))
