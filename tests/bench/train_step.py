"""One optimizer step of a model of full width with random weights, beside what `mtraining plan` says of it.

    python tests/bench/train_step.py --model qwen2.5-3b --layers 36 --seq-len 131072 --density 1 0.05
    torchrun --nproc-per-node 2 tests/bench/train_step.py --model llama3.1-8b --layers 8 --seq-len 262144 --zero 3
    python tests/bench/train_step.py --model tiny --layers 2 --seq-len 512 --density 1 0.3 --warmup 0        on a CPU

All ranks are one ring. The step is the torch engine's own (`engines/step.py`) at random tokens; recomputation and all
else are the same for every density; 1 is dense attention, others are vertical-slash with budgets fixed so that about
that share is kept (random weights), and what was kept stands in the row. Parts are CUDA events on the compute stream
of the slowest rank, wall time on a CPU: attention holds its kernels and waits, both passes and recomputation; waiting
is what stands still for keys; rest is matrix products, norms, and FSDP's gathers and sums. With --trace a further step
runs under torch.profiler: the time in which NCCL runs and no other kernel does, FSDP included. Peaks are those of
tensors.
"""

import argparse
import gc
from dataclasses import replace

import torch
from transformers import AutoConfig

from mtraining_nns.engines.step import train_step
from mtraining_nns.engines.world import start
from mtraining_nns.environment import Process, prepare_caches
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.plan import trial
from mtraining_nns.plan.constants import Constants, of_device
from mtraining_nns.plan.estimate import Estimate
from mtraining_nns.plan.memory import GIB
from mtraining_nns.plan.setting import Setting
from mtraining_nns.recipe import Recipe
from mtraining_nns.sections import CheckpointConfig, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from mtraining_nns.tables import align

MODELS = {  # config.json of Qwen/Qwen2.5-3B and meta-llama/Llama-3.1-8B
    "qwen2.5-3b": {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "llama3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": False,
    },
}  # fmt: skip
LAYERS = {"qwen2.5-3b": 36, "llama3.1-8b": 32, "tiny": 2}
HEAD = (
    "kept", "step s", "tok/s/GPU", "MFU dense", "MFU kept", "attention", "index", "loss", "optimizer", "waiting",
    "rest", "peak fwd/bwd/upd GiB", "plan s", "plan/step", "plan GiB", "plan/peak",
)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    prepare_caches()
    world_size = (Process.launched() or Process()).world
    with start(ParallelConfig(cp=world_size, zero=args.zero)) as world:
        constants = constants_of(args.constants, world.device)
        rows = [HEAD]
        for density in args.density:
            rows.append(measure(args, density, world, constants))
        if world.rank == 0:
            keep = ", attention outputs kept" if args.keep_output else ""
            print(f"{args.model}, {args.layers} layers, {args.seq_len} tokens on {world_size} ranks, zero {args.zero},")
            print(f"recompute {not args.no_recompute}{keep}; plan with the numbers of {constants.gpu}; {world.about}")
            print(align([list(row) for row in rows]))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="qwen2.5-3b")
    add("--layers", type=int, help="default: all of the model")
    add("--seq-len", type=int, default=131072, help="global")
    add("--density", type=float, nargs="+", default=[1.0, 0.05])
    add("--zero", type=int, choices=(2, 3), default=2)
    add("--no-recompute", action="store_true")
    add("--keep-output", action="store_true")
    add("--warmup", type=int, default=2)
    add("--trace", action="store_true", help="a further step under torch.profiler")
    add("--constants", help="a file of mtraining calibrate (default: the packaged numbers of this GPU)")
    args = parser.parse_args(argv)
    args.layers = args.layers or LAYERS[args.model]
    return args


def constants_of(path: str | None, device: torch.device) -> Constants:
    """A file's, this GPU's, or on a CPU some, whose backend it has."""
    if path:
        return Constants.load(path)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = of_device(name)
        if found is None:
            raise SystemExit(f"no packaged numbers of {name}; give --constants FILE of mtraining calibrate")
        return found
    a100 = Constants.of("a100-40gb")
    rates = {name.replace("triton", "torch"): number for name, number in a100.numbers.items()}
    return replace(a100, gpu="an A100, not of this CPU", capability=(0, 0), numbers=a100.numbers | rates)


def recipe_of(args, density: float, world, config) -> Recipe:
    gpu = world.device.type == "cuda"
    attention = AttentionConfig(block=128 if gpu else 32, keep_output=args.keep_output)
    kinds = ("bfloat16", "bf16") if gpu else ("float32", "fp32")
    return Recipe(
        model=ModelConfig(path="random weights", dtype=kinds[0]),
        data=DataConfig(path="random tokens"),
        train=TrainConfig(
            steps=args.warmup + 1, seq_len=args.seq_len, lr=1e-5, recompute=not args.no_recompute, precision=kinds[1]
        ),
        checkpoint=CheckpointConfig(dir="none"),
        attention=trial.of_density(attention, args.seq_len, density),
        parallel=ParallelConfig(cp=world.ring.world, zero=args.zero),
    ).shared_by(world.ring.world)


def measure(args, density: float, world, constants: Constants) -> tuple[str, ...]:
    """The row of one density."""
    config = AutoConfig.for_model(
        **MODELS[args.model], num_hidden_layers=args.layers, max_position_embeddings=args.seq_len
    )
    recipe = recipe_of(args, density, world, config)
    found = trial.run(recipe, config, world, warmup=args.warmup)
    planned = Estimate.of(Setting.of(recipe, found.shape, constants, found.kept), constants)
    if world.device.type == "cuda":
        _give_back()
        if args.trace:
            trace(recipe, config, world)
            _give_back()
    return row(found, planned)


def _give_back() -> None:
    """The model is gone; its memory, too, before the next one."""
    gc.collect()
    torch.cuda.empty_cache()


def row(found: trial.Trial, planned: Estimate) -> tuple[str, ...]:
    seconds, step = found.seconds, found.seconds["step"]
    attention = seconds["attention forward"] + seconds["attention backward"]
    parts = {"attention": attention, **{name: seconds.get(name, 0.0) for name in ("index", "loss", "optimizer")}}
    rest = step - sum(parts.values())
    real = replace(planned.time, parts={"step": step})  # the same operations in the measured time
    peaks = [found.peaks.get(name, 0) / GIB for name in ("forward", "backward", "update")]
    tensors = planned.memory.tensors / GIB
    return (
        f"{found.kept:.2%}",
        f"{step:.3f}",
        f"{real.tokens_per_s / real.world:,.0f}",
        f"{real.mfu(dense=True):.1%}",
        f"{real.mfu(dense=False):.1%}",
        *(f"{part / step:.1%}" for part in (*parts.values(), seconds.get("wait", 0.0), rest)),
        " / ".join(f"{peak:.2f}" for peak in peaks) if any(peaks) else "not on a CPU",
        f"{planned.time.seconds:.3f}",
        f"{planned.time.seconds / step:.2f}",
        f"{tensors:.2f}",
        f"{tensors / max(peaks):.2f}" if any(peaks) else "-",
    )


def trace(recipe: Recipe, config, world) -> None:
    """Print for how long NCCL runs alone in one step of the slowest rank."""
    from torch.profiler import ProfilerActivity, profile

    model, _, optimizer = trial.build(recipe, config, world)
    batches = trial.random_batches(recipe, config.vocab_size, world, 0)
    train_step(model, optimizer, batches, world, recipe=recipe, step=0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        train_step(model, optimizer, batches, world, recipe=recipe, step=1)
        torch.cuda.synchronize()
    spans = [
        ("nccl" in event.name.lower(), event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    alone_s = alone([s[1:] for s in spans if s[0]], [s[1:] for s in spans if not s[0]]) / 1e6
    slowest = world.max(torch.tensor([alone_s], device=world.device)).item()
    world.say(f"NCCL alone, ring and FSDP: {slowest:.4f} s of the step")


def alone(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How long spans of `some` run while none of `others` does.

    >>> alone([(0, 4), (3, 6)], [(1, 2), (5, 9)])
    4.0
    """
    ends = [(start, 0, 1) for start, _ in some] + [(end, 0, -1) for _, end in some]
    ends += [(start, 1, 1) for start, _ in others] + [(end, 1, -1) for _, end in others]
    running, total, before = [0, 0], 0.0, 0.0
    for moment, kind, change in sorted(ends):
        if running[0] and not running[1]:
            total += moment - before
        running[kind] += change
        before = moment
    return total


if __name__ == "__main__":
    main()
