"""Speed told honestly: what tokens a second are worth, and where the time of a step goes.

MFU is the model's operations over the peak of the GPUs where that is known, else TFLOP/s are told. Dense-equivalent
counts all causal pairs, as if none had been left out; kept counts those that the last micro-batch of the first ring
kept (`flops.py`). Shares of a step's time are measured on chosen steps (`ops/clock.py`), never guessed.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mtraining_nns import flops
from mtraining_nns.ops import clock
from mtraining_nns.plan import constants
from mtraining_nns.plan.shape import Shape


@dataclass(frozen=True)
class Speed:
    """What tokens a second mean: of a model, on `world` GPUs of one peak; None where it is not known.

    sequences: of a micro-batch of one ring.
    """

    shape: Shape
    seq_len: int
    sequences: int
    world: int
    peak_tflops: float | None

    @classmethod
    def of(cls, shape: Shape, recipe, world) -> "Speed":
        """Of a run; world: its World."""
        known = None
        if world.device.type == "cuda":
            known = constants.of_device(torch.cuda.get_device_name(world.device))
        peak = known["peak_tflops"] if known else None
        return cls(shape, recipe.train.seq_len, recipe.train.micro_batch, world.mesh.size(), peak)

    def values(self, tokens_per_s: float | None, kept_pairs: float) -> dict[str, float]:
        """By tag, nothing while the speed is unknown. kept_pairs: of a micro-batch of a ring, all layers and heads."""
        if tokens_per_s is None:
            return {}
        values = {"speed/tokens_per_s_per_gpu": tokens_per_s / self.world}
        causal = flops.causal_pairs(self.shape, self.seq_len)
        for name, pairs in (("dense_equivalent", causal), ("kept", kept_pairs / self.sequences)):
            done = flops.training_flops(self.shape, tokens=1, pairs=pairs / self.seq_len)
            tflops = tokens_per_s / self.world * done / 1e12
            values[f"speed/tflops_{name}"] = tflops
            if self.peak_tflops is not None:
                values[f"speed/mfu_{name}"] = tflops / self.peak_tflops
        return values


class Profile:
    """Shares of the time of every `every`-th step; 0: of none."""

    def __init__(self, every: int, device: torch.device):
        self.every, self.device, self.found = every, device, None

    @contextmanager
    def step(self, done: int):
        """Around the step that is the `done`-th."""
        self.found = None
        if not self.every or done % self.every:
            yield
            return
        with clock.running(self.device) as self.found:
            yield

    def values(self) -> dict[str, float]:
        """Of the last step, by tag; empty if it was not measured. Waits for the device.

        attention: its kernels and waits, index apart; exposed: what stands still for transfers around the ring.
        """
        if self.found is None:
            return {}
        seconds = self.found.seconds()
        whole = seconds["step"]
        attention = seconds.get("attention forward", 0.0) + seconds.get("attention backward", 0.0)
        shares = {"attention": attention, "index": seconds.get("index", 0.0), "exposed": seconds.get("wait", 0.0)}
        shares |= {name: seconds[name] for name in ("loss", "optimizer") if name in seconds}
        return {"time/step_s": whole, **{f"time/{name}_share": part / whole for name, part in shares.items()}}
