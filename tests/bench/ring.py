"""A ring of GPUs against one of them, and what of the communication shows.

    torchrun --nproc-per-node 2 tests/bench/ring.py                    S 262144, 16/2, d 128: standard pattern, dense
    torchrun --nproc-per-node 4 tests/bench/ring.py --inner 2 --patterns sparse

Forward and backward are the operator's own passes with the index given, LAYERS of them queued in a row as in a model,
one where they are dense.
One GPU is rank 0 alone with the whole sequence; `x ideal` is the ring's time over one GPU's time divided by the ranks.
Exposed is the time for which the compute stream stands still at a wait for a transfer, by CUDA events before and after
it, mean over ranks. Medians, a layer.
"""

import argparse
import os
import re
import statistics
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from attention import BLOCK, Shape, operator_of, standard_index

from mtraining_nns.ops import clock
from mtraining_nns.ops.config import LAYOUTS, AttentionConfig
from mtraining_nns.ops.index import DistanceIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import MODES, Circle, Ring, placed

WAIT = "wait for "  # spans of the waits for one transfer begin so
Milliseconds = dict[str, float]  # by the name of a span


@dataclass(frozen=True)
class Turns:
    """How often both passes are repeated, layers queued in a row, and turns before those that count."""

    repeats: int = 10
    layers: int = 4
    warmup: int = 2


DENSE = Turns(repeats=3, layers=1)  # a dense pass takes seconds


@contextmanager
def named_waits():
    """Within it the clock has a span for every wait, by what travels, the same on all ranks."""
    arrived = Circle.arrived

    def named(self, work, what):
        with clock.span(WAIT + re.split(" over ranks|: rank", placed(what))[0]):
            arrived(self, work, what)

    Circle.arrived = named
    try:
        yield
    finally:
        Circle.arrived = arrived


def passes(operator, inputs, seq_len: int, turns=Turns(), *, by_hop=True) -> tuple[Milliseconds, Milliseconds]:
    """Of a layer's forward and backward pass, by the spans of `ops/clock.py`; "step" is all of it.

    CUDA events, wall time on a CPU. by_hop: waits by what travels, too, which takes some of the host's time.
    """
    *tensors, dout = inputs
    leaves, found = [x.detach().requires_grad_() for x in tensors], []
    for _ in range(turns.warmup + turns.repeats):
        if dist.is_initialized() and operator.ring.world > 1:
            dist.barrier()
        if dout.is_cuda:
            torch.cuda.synchronize()
        with named_waits() if by_hop else nullcontext():
            with clock.running(dout.device) as forward:
                outs = [operator(*leaves, seq_len=seq_len) for _ in range(turns.layers)]
            with clock.running(dout.device) as backward:
                while outs:
                    torch.autograd.grad(outs.pop(), leaves, dout)
        found.append((forward.seconds(), backward.seconds()))
    forward, backward = zip(*found[turns.warmup :])
    return _medians(forward, turns.layers), _medians(backward, turns.layers)


def _medians(found, layers: int) -> Milliseconds:
    return {name: 1e3 * statistics.median(turn[name] for turn in found) / layers for name in found[0]}


def step_ms(found: tuple[Milliseconds, Milliseconds]) -> list[float]:
    """Of all that a pass does."""
    return [part["step"] for part in found]


def slowest(values: list[float], device) -> list[float]:
    """Of each value the largest over all ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def mean(values: list[float], device) -> list[float]:
    """Of each value the mean over all ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def waits_ms(found: tuple[Milliseconds, Milliseconds], device) -> Milliseconds:
    """Exposed time of each transfer, mean over ranks."""
    waits = {
        f"{way}: {name.removeprefix(WAIT)}": ms
        for way, part in zip(("forward", "backward"), found)
        for name, ms in part.items()
        if name.startswith(WAIT)
    }
    return dict(zip(waits, mean(list(waits.values()), device))) if waits else {}


def show_waits(waits: Milliseconds) -> None:
    for what, ms in waits.items():
        print(f"    {what:65s} exposed {ms:7.3f} ms", flush=True)


def report(name: str, shape: Shape, index: DistanceIndex, rings: dict[str, Ring], **settings) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    config, inner = AttentionConfig(block=index.block, **settings), next(iter(rings.values())).node_size
    layout = Layout.of(config, shape.seq_len, world, inner)
    inputs, turns = shape.inputs(), DENSE if index.dense else Turns()
    alone = [0.0, 0.0]
    if rank == 0:
        alone = step_ms(passes(operator_of(index, device_type="cuda", **settings), inputs, shape.seq_len, turns))
        print(f"{shape}  {name:18s} one GPU          {alone[0]:8.2f} {alone[1]:8.2f}", flush=True)
    dist.barrier()
    local = [layout.shard(x, rank) for x in inputs]
    del inputs
    for mode, ring in rings.items():
        operator = operator_of(index, ring, "cuda", **settings)
        found = passes(operator, local, shape.seq_len, turns)
        ms, waits, ideal = slowest(step_ms(found), "cuda"), waits_ms(found, "cuda"), [part / world for part in alone]
        if rank == 0:
            print(
                f"{shape}  {name:18s} ring of {world} {mode:6s} {ms[0]:8.2f} {ms[1]:8.2f}"
                f"  x ideal {ms[0] / ideal[0]:.3f} {ms[1] / ideal[1]:.3f}  sum {sum(ms) / sum(ideal):.3f}",
                flush=True,
            )
            show_waits(waits)
    if rank == 0:
        print(f"    statistics of a layer, read where steps are logged: {statistics_ms(operator):.3f} ms", flush=True)


def statistics_ms(operator) -> float:
    """Milliseconds that density and work of one layer hold up the host."""
    times = []
    for _ in range(Turns.repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        operator.read_stats()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=262144)
    parser.add_argument("--layout", choices=LAYOUTS, default="striped")
    parser.add_argument("--granularity", type=int)
    parser.add_argument("--inner", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--patterns", nargs="+", choices=("sparse", "dense"), default=("sparse", "dense"))
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rings = {mode: Ring.create(dist.get_world_size(), inner=args.inner, mode=mode) for mode in args.modes}
    shape = Shape(args.seq_len, 16, 2, 128)
    settings = {"layout": args.layout, "granularity": args.granularity, "backend": args.backend}
    if "sparse" in args.patterns:
        report("standard pattern", shape, standard_index(args.seq_len, 16), rings, **settings)
    if "dense" in args.patterns:
        blocks = Layout.of(AttentionConfig(block=BLOCK, **settings), args.seq_len, dist.get_world_size()).global_blocks
        report("dense", shape, DistanceIndex.keep_all(1, 16, blocks, BLOCK, "cuda"), rings, **settings, pattern="dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
