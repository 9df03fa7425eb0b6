"""How attention scales over the GPUs of one host, and what `mtraining plan` says of it before it is measured.

    torchrun --nproc-per-node 8 tests/bench/scaling.py                  S 262144 and 524288, 16/2 and 32/8, d 128
    torchrun --nproc-per-node 4 tests/bench/scaling.py --constants measured.yaml --hops --out scaling.json
    torchrun --nproc-per-node 4 tests/bench/scaling.py --seq-len 2048 --heads 4/2 --dim 16      dry run on CPUs

A row is one layer's attention, forward and backward: every key, or the standard pattern (the same counts at every
length), on one of the rings that divide the host: flat ones, and from 4 ranks on two levels, 2 x half of them. Rings
smaller than the host run on all of it at once, and the slowest rank counts. Times are ms a layer, medians:

    planned     by the constants of the GPU, or --constants FILE of `mtraining calibrate`, printed before anything is
                measured
    total       forward + backward, as the operator runs them; plan ratio is planned over total
    index       part of forward: the estimate, after which the standard pattern is taken instead of what it found
    speedup     one GPU's total over this one; x ideal is this one over one GPU's divided by the ranks
    exposed     waits for transfers, mean over ranks; --hops shows each
    worker      with step and critical the balance of the last call, see `ops/balance.py`; of several rings the worst

Four sparse layers are queued in a row, as in a model; one on a CPU, which queues nothing. A row repeats its passes as
long as --seconds allow by the plan; a dense pass beyond them runs once, after one of a short sequence. Inputs are
random, and each rank makes its own part only.
"""

import argparse
import itertools
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from attention import Shape, standard_index
from ring import Turns, mean, passes, show_waits, slowest, step_ms, waits_ms
from train_step import constants_of

from mtraining_nns.engines.world import World, start
from mtraining_nns.environment import Process, prepare_caches
from mtraining_nns.metrics import attention_stats
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.balance import Balance
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import DistanceIndex
from mtraining_nns.ops.patterns import vertical_slash
from mtraining_nns.ops.ring import MODES, Ring
from mtraining_nns.plan import shape as plan_shape
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.times import attention_parts
from mtraining_nns.recipe import Recipe
from mtraining_nns.sections import CheckpointConfig, DataConfig, ModelConfig, ParallelConfig, TrainConfig

PATTERNS = {"dense": "dense", "sparse": "vertical_slash"}
LAYERS = {"dense": 1, "sparse": 4}  # queued in a row on a GPU
MOST_REPEATS = 5
SHORT = 32768  # tokens of the pass that compiles the kernels where a warm-up of full length would take too long
BEFORE = {"attention": ">9s", "cp": ">2d", "ring": ">17s", "backend": ">7s", "planned_ms": ">9.2f"}
AFTER = {
    "total_ms": ">9.2f", "plan_ratio": ">10.3f", "forward_ms": ">9.2f", "index_ms": ">7.2f",
    "backward_ms": ">9.2f", "speedup": ">7.2f", "x_ideal": ">7.3f", "exposed_ms": ">8.3f",
    "worker": ">6.3f", "step": ">6.3f", "critical": ">8.3f",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What the rows of one shape share. index: the standard pattern; world: its ring is not used."""

    shape: Shape
    index: DistanceIndex
    world: World
    constants: Constants
    seconds: float
    hops: bool

    @property
    def kept(self) -> float:
        return self.index.density(self.shape.seq_len).item()


def main(argv: list[str] | None = None) -> None:
    args, began = arguments(argv), time.perf_counter()
    prepare_caches()
    ranks = (Process.launched() or Process()).world
    with start(ParallelConfig(cp=1, dp=ranks)) as world:
        device = world.device
        constants, rings = constants_of(args.constants, device), rings_of(ranks)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        found = {"device": name, "world": ranks, "torch": torch.__version__, "planned_with": constants.gpu, "rows": []}
        world.say(f"{ranks} x {name}, torch {torch.__version__}; planned with the numbers of {constants.gpu}")
        for seq_len, heads in itertools.product(args.seq_len, args.heads):
            save(found, args.out, world.rank)
            index = standard_index(seq_len, heads[0], device=device)
            case = Case(Shape(seq_len, *heads, args.dim), index, world, constants, args.seconds, args.hops)
            world.say(f"\n{case.shape}, the standard pattern keeps {case.kept:.2%}")
            world.say("  ".join(heading(name, spec) for name, spec in (BEFORE | AFTER).items()))
            found["rows"] += rows_of(case, rings)
        found["seconds"] = time.perf_counter() - began
        save(found, args.out, world.rank)
        world.say(f"\n{found['seconds']:.1f} s in all")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seq-len", type=int, nargs="+", default=(262144, 524288), help="global; the pattern needs 1536 and more")
    add("--heads", type=heads_of, nargs="+", default=((16, 2), (32, 8)), help="query heads / key heads")
    add("--dim", type=int, default=128)
    add("--seconds", type=float, default=3.0, help="of the timed passes of a row")
    add("--hops", action="store_true", help="exposed time of each transfer; takes some of the host's time")
    add("--constants", help="a file of mtraining calibrate (default: the packaged numbers of this GPU)")
    add("--out", help="JSON file of the rows")
    return parser.parse_args(argv)


def heads_of(text: str) -> tuple[int, int]:
    heads, kv_heads = map(int, text.split("/"))
    return heads, kv_heads


def save(found: dict, path: str | None, rank: int) -> None:
    """What there is so far: a run that is ended early leaves its rows."""
    if path and rank == 0:
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def rings_of(ranks: int) -> list[Ring]:
    """Of all sizes that divide the ranks, one GPU first, both modes on the same connections. Collective."""
    found = [Ring.single()]
    for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
        for inner in (None, size // 2) if size > 2 and size % 2 == 0 else (None,):
            ring = Ring.create(size, inner=inner, mode="gather")
            found += [replace(ring, mode=mode) for mode in MODES]
    return found


def rows_of(case: Case, rings: list[Ring]) -> list[dict]:
    """Of dense attention on flat rings, then of the standard pattern on all. Collective."""
    rows = []
    for attention in PATTERNS:
        alone = None
        for ring in rings:
            if attention == "sparse" or ring.node_size is None:
                rows.append(row_of(case, attention, ring, alone))
                alone = alone or rows[-1]["total_ms"]
    return rows


def row_of(case: Case, attention: str, ring: Ring, alone: float | None) -> dict:
    """Plan, print, measure, print. alone: ms of one GPU, None where it is measured here."""
    operator = operator_for(case, attention, ring)
    setting = setting_of(case, operator)
    indices = () if attention == "dense" else (case.shape.seq_len, [case.index])
    parts = {name: 1e3 * s for name, s in attention_parts(setting, case.constants, indices).items()}
    shape = case.shape
    row = {
        "seq_len": shape.seq_len, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.dim,
        "kept": setting.kept, "attention": attention, "cp": ring.world, "ring": setting.ring,
        "backend": setting.backend, "planned_ms": sum(parts.values()), "planned_parts_ms": parts,
    }  # fmt: skip
    if case.world.rank == 0:
        print("  ".join(format(row[name], spec) for name, spec in BEFORE.items()), end="  ", flush=True)
    found = measured(case, operator, attention, row["planned_ms"])
    row |= measures(case, operator, found)
    alone = alone or row["total_ms"]
    row["plan_ratio"] = row["planned_ms"] / row["total_ms"]
    row["speedup"], row["x_ideal"] = alone / row["total_ms"], row["total_ms"] * ring.world / alone
    case.world.say("  ".join(format(row[name], spec) for name, spec in AFTER.items()))
    if case.hops:
        row["hops_ms"] = waits_ms(found, case.world.device)
        show_waits(row["hops_ms"] if case.world.rank == 0 else {})
    return row


def operator_for(case: Case, attention: str, ring: Ring) -> Operator:
    """A sparse one estimates and then keeps what the standard pattern says."""
    shape, device = case.shape, case.world.device
    operator = Operator(AttentionConfig(pattern=PATTERNS[attention], block=case.index.block), ring, device.type)
    operator.prepare(shape.dim, shape.heads, shape.kv_heads, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if attention == "sparse":
        operator._pattern = lambda layer, layout: SimpleNamespace(build=partial(estimate_and_take, case.index))
    return operator


def estimate_and_take(index: DistanceIndex, *args) -> DistanceIndex:
    vertical_slash.build(*args)
    return index


def setting_of(case: Case, operator: Operator) -> Setting:
    """One layer of attention for the plan, which asks for nothing else of the model."""
    shape, ring, precision = case.shape, operator.ring, "bf16" if case.world.device.type == "cuda" else "fp32"
    levels = "flat" if ring.node_size is None else "hierarchical"
    recipe = Recipe(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        train=TrainConfig(steps=1, seq_len=shape.seq_len, lr=1e-5, recompute=False, precision=precision),
        checkpoint=CheckpointConfig(dir="none"),
        attention=operator.config,
        parallel=ParallelConfig(cp=ring.world, ring=levels, inner=ring.node_size, inner_mode=ring.mode),
    ).shared_by(ring.world)
    layer = plan_shape.Shape(
        layers=1, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.dim,
        hidden=0, intermediate=0, vocabulary=0, tied=True, linear=0, layer_weights=(), root_weights=(),
    )  # fmt: skip
    backend = operator.choice(shape.seq_len, 0)[0]
    return Setting(recipe=recipe, shape=layer, world=ring.world, node=ring.world, backend=backend, density=case.kept)


def measured(case: Case, operator: Operator, attention: str, planned_ms: float):
    """What `ring.passes` finds, in about the seconds of a row."""
    layers, seq_len = LAYERS[attention] if case.world.device.type == "cuda" else 1, case.shape.seq_len
    turn_s = layers * planned_ms / 1e3
    repeats = max(1, min(MOST_REPEATS, int(case.seconds / turn_s)))
    too_long = attention == "dense" and turn_s > case.seconds
    if too_long:
        short = min(SHORT, seq_len)
        passes(operator, inputs_of(case, operator, short), short, Turns(1, layers, 0), by_hop=case.hops)
    turns = Turns(repeats, layers, warmup=0 if too_long else 1)
    return passes(operator, inputs_of(case, operator, seq_len), seq_len, turns, by_hop=case.hops)


def inputs_of(case: Case, operator: Operator, seq_len: int) -> tuple[torch.Tensor, ...]:
    """Of this rank, for a global sequence."""
    return replace(case.shape, seq_len=operator.layout(seq_len).local_len).inputs(case.world.device)


def measures(case: Case, operator: Operator, found) -> dict[str, float]:
    """Times over all ranks, and the balance of the last call. Collective."""
    device, (forward, backward) = case.world.device, found
    forward_ms, backward_ms, index_ms = slowest([*step_ms(found), forward.get("index", 0.0)], device)
    stats = attention_stats(operator, replace(case.world, ring=operator.ring))
    return {
        "total_ms": forward_ms + backward_ms,
        "forward_ms": forward_ms,
        "index_ms": index_ms,
        "backward_ms": backward_ms,
        "exposed_ms": mean([forward.get("wait", 0.0) + backward.get("wait", 0.0)], device)[0],
        **{name: stats[f"attention/balance_{name}"] for name in Balance._fields},
    }


def heading(name: str, spec: str) -> str:
    """A name without its unit, as wide as its column."""
    width = int(spec.strip(">sdf").partition(".")[0])
    return name.removesuffix("_ms").replace("_", " ").rjust(width)


if __name__ == "__main__":
    main()
