"""What a run says while it trains: one line per logged step on rank 0, and TensorBoard scalars.

    step 20/60  loss 5.1204  norm 1.31  lr 1.8e-03  tokens/s 9,120  a GPU 4,560  MFU dense-equivalent 41.2%
        of kept pairs 18.3%  mem 1.1 GB  density 0.312  work max/mean 1.02

Speed is that of the steps after the first two of a process (`speed.py`).
density: share of causal query-key pairs that are kept, mean over layers. work max/mean: kept pairs of the busiest rank
of a ring over the ring's mean, for the last micro-batch.
"""

import resource
import time
from dataclasses import dataclass

import torch
from torch.utils.tensorboard import SummaryWriter

from mtraining_nns.ops import balance
from mtraining_nns.speed import Profile, Speed

BALANCE_TAGS = ("attention/work_max_over_mean", *(f"attention/balance_{name}" for name in balance.Balance._fields))
WARMUP_STEPS = 2  # first steps of a process: compilation and allocation, not training speed


class Meter:
    """Tokens per second over the steps of this process after its warm-up; saves and evaluations do not count."""

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.steps, self.measured, self.seconds = 0, 0, 0.0

    def __enter__(self):
        self.began = time.perf_counter()

    def __exit__(self, *error):
        self.steps += 1
        if self.steps > WARMUP_STEPS:
            self.measured += 1
            self.seconds += time.perf_counter() - self.began

    def tokens_per_s(self) -> float | None:
        """None until the warm-up is over."""
        return self.tokens_per_step * self.measured / self.seconds if self.measured else None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has used: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attention_stats(operator, world) -> dict[str, float]:
    """Density by layer, capped heads, work max/mean and the balance of the ring. Collective, waits for the device.

    Of several rings the largest values count. Work max/mean takes all layers as one; the balance does not, since ranks
    meet in every layer. There is no balance where `ops/balance.py` cannot count a layer's form of index.
    """
    stats = operator.read_stats()
    density = stats["density"]
    values = {f"attention/density_layer_{layer:02d}": value for layer, value in density.items()}
    values["attention/density"] = sum(density.values()) / len(density)
    values["attention/capped_heads"] = sum(stats["capped"].values())
    work = torch.tensor([float(sum(stats["work"].values()))], dtype=torch.float64, device=world.device)
    ring = torch.stack(world.ring.gather(torch.cat([work, *_work_by_hop(operator)])))
    total, by_hop = ring[:, 0], ring[:, 1:]
    values["attention/kept_pairs"] = total.sum().item()
    measures = [total.max() / total.mean()]
    if by_hop.numel() > 0:
        measures += balance.measure(by_hop.unflatten(1, (-1, len(ring))).transpose(0, 1))
    found = world.max(torch.tensor(measures, dtype=torch.float64, device=world.device))
    return values | dict(zip(BALANCE_TAGS, found.tolist(), strict=False))


def _work_by_hop(operator) -> list[torch.Tensor]:
    """float64 [hops] of each layer: pairs of this rank in its last call. Empty where a layer cannot be counted."""
    last = [layer for _, layer in sorted(operator.last.items())]
    if not all(type(index) in balance.PAIRS_BY_KEY for index, _ in last):
        return []
    holds = torch.tensor([balance.sources(operator.ring)])
    return [balance.work(index, layout, holds)[0] for index, layout in last]


@dataclass(frozen=True)
class Gauges:
    """What a step is measured with: how fast it was, what its operator kept, and who takes part."""

    meter: Meter
    speed: Speed
    profile: Profile
    operator: object
    world: object


def step_values(gauges: Gauges, *, loss: float, grad_norm, lr: float, peak_bytes: int) -> dict:
    """Scalars of a logged step by tag. Collective."""
    world, tokens_per_s = gauges.world, gauges.meter.tokens_per_s()
    attention = attention_stats(gauges.operator, world)
    memory = torch.tensor(peak_bytes / 1e9, device=world.device)
    return {
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "train/lr": lr,
        "speed/tokens_per_s": tokens_per_s,
        **gauges.speed.values(tokens_per_s, attention["attention/kept_pairs"]),
        **gauges.profile.values(),
        "memory/peak_gb": world.max(memory).item(),
        **attention,
    }


def summary(losses: list[float], values: dict, *, world: int, tokens_per_step: int) -> dict:
    """A run in figures: values are the latest ones by tag."""
    return {
        "steps": len(losses),
        "world": world,
        "tokens_per_step": tokens_per_step,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **{tag: value for tag, value in values.items() if value is not None},
        "losses": losses,
    }


class Log:
    """Progress line and TensorBoard, on rank 0; silent elsewhere. A resumed run replaces the steps from `start` on."""

    def __init__(self, folder: str, *, start: int, steps: int, rank: int):
        self.steps = steps
        self.writer = SummaryWriter(folder, purge_step=start) if rank == 0 else None

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """Values of the step that was the `step`-th, by TensorBoard tag."""
        if self.writer is None:
            return
        for tag, value in values.items():
            if value is not None:
                self.writer.add_scalar(tag, value, step)

    def line(self, step: int, values: dict[str, float | None]) -> None:
        """Print the progress line of a step."""
        if self.writer is not None:
            print("  ".join([f"step {step}/{self.steps}", *_words(values)]), flush=True)

    def close(self) -> None:
        """Write what is buffered."""
        if self.writer is not None:
            self.writer.close()


FORMATS = {
    "train/loss": "loss {:.4f}",
    "train/grad_norm": "norm {:.2f}",
    "train/lr": "lr {:.1e}",
    "speed/tokens_per_s": "tokens/s {:,.0f}",
    "speed/tokens_per_s_per_gpu": "a GPU {:,.0f}",
    "speed/mfu_dense_equivalent": "MFU dense-equivalent {:.1%}",
    "speed/mfu_kept": "of kept pairs {:.1%}",
    "time/attention_share": "attention {:.0%} of the time",
    "time/index_share": "index {:.1%}",
    "time/exposed_share": "waiting {:.1%}",
    "memory/peak_gb": "mem {:.1f} GB",
    "attention/density": "density {:.3f}",
    "attention/work_max_over_mean": "work max/mean {:.2f}",
    "eval/loss_dense": "held-out loss dense {:.4f}",
    "eval/loss_sparse": "sparse {:.4f}",
    "eval/niah": "needles {:.3f}",
    "eval/niah_loss": "loss of their answers {:.4f}",
}


def _words(values: dict[str, float | None]) -> list[str]:
    return [text.format(values[tag]) for tag, text in FORMATS.items() if values.get(tag) is not None]
