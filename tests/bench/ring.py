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
import statistics
import time
from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.distributed as dist
from attention import BLOCK, Shape, operator_of, standard_index

from mtraining_nns.ops.config import LAYOUTS, AttentionConfig
from mtraining_nns.ops.index import DistanceIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import MODES, Circle, Ring

REPEATS, LAYERS = 10, 4
DENSE = (3, 1)  # a dense pass takes seconds


@contextmanager
def exposed(waits: dict):
    """Within it every wait of a transfer is timed: (before, after) events by what travelled."""
    arrived = Circle.arrived

    def timed(self, work, what):
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            return arrived(self, work, what)  # a transfer waits for another one: nothing stands still
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        arrived(self, work, what)
        events[1].record()
        waits[what.partition(":")[0]].append(events)

    Circle.arrived = timed
    try:
        yield
    finally:
        Circle.arrived = arrived


def passes(operator, inputs, seq_len: int, repeats=REPEATS, layers=LAYERS) -> tuple[list[float], list[dict]]:
    """Milliseconds of a forward and a backward pass, and the exposed waits of both."""
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    times, waits = ([], []), [defaultdict(list), defaultdict(list)]
    for turn in range(repeats + 2):
        ready = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        if dist.is_initialized() and operator.ring.world > 1:
            dist.barrier()
        kept = waits if turn >= 2 else [defaultdict(list), defaultdict(list)]
        torch.cuda.synchronize()
        ready[0].record()
        with exposed(kept[0]):
            outs = [operator(*leaves, seq_len=seq_len) for _ in range(layers)]
        ready[1].record()
        with exposed(kept[1]):
            while outs:
                torch.autograd.grad(outs.pop(), leaves, dout)
        ready[2].record()
        torch.cuda.synchronize()
        if turn >= 2:
            for part in (0, 1):
                times[part].append(ready[part].elapsed_time(ready[part + 1]) / layers)
    by_what = [{what: [a.elapsed_time(b) for a, b in events] for what, events in part.items()} for part in waits]
    return [statistics.median(part) for part in times], by_what


def report(name: str, shape: Shape, index: DistanceIndex, rings: dict[str, Ring], **settings) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    config, inner = AttentionConfig(block=index.block, **settings), next(iter(rings.values())).node_size
    layout = Layout.of(config, shape.seq_len, world, inner)
    inputs, size = shape.inputs(), DENSE if index.dense else (REPEATS, LAYERS)
    alone = [0.0, 0.0]
    if rank == 0:
        alone, _ = passes(operator_of(index, device_type="cuda", **settings), inputs, shape.seq_len, *size)
        print(f"{shape}  {name:18s} one GPU          {alone[0]:8.2f} {alone[1]:8.2f}", flush=True)
    dist.barrier()
    local = [layout.shard(x, rank) for x in inputs]
    del inputs
    for mode, ring in rings.items():
        operator = operator_of(index, ring, "cuda", **settings)
        found, waits = passes(operator, local, shape.seq_len, *size)
        slowest = torch.tensor(found, device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        ms, ideal = slowest.tolist(), [part / world for part in alone]
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
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        operator.read_stats()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def show_waits(by_what: list[dict]) -> None:
    """Exposed milliseconds of each transfer, mean over ranks."""
    for part, waits in zip(("forward", "backward"), by_what):
        for what, values in waits.items():
            mean = torch.tensor([statistics.median(values)], device="cuda")
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"    {part:8s} {what:56s} exposed {mean.item() / dist.get_world_size():7.3f} ms", flush=True)


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
