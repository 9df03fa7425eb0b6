"""Measure on this machine what a plan needs to know about it: `mtraining calibrate`.

    matmul_tflops           the products of a layer of Qwen2.5-3B, and of the head
    *_dense_*, *_sparse_*   the operator's passes alone, dense and with about 5 % of the pairs, at the longest length
    call_*_ms, index_*      the same at the shortest one; the estimate at both
    memory_gb_s             what norms, rotations and activations reach in a real step of a few layers: what its forward
                            pass takes beyond products, attention, index and loss
    allocator_share         what the allocator took in that step beyond tensors
    host_gb_s               pinned memory to the device
    intra_*, inter_*        two ranks and more: neighbours within and between machines send and receive at once

At most 128K tokens of one layer, so that a plan of 512K is a prediction. On a CPU everything is small: the numbers mean
little there, but the same code runs.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from transformers import AutoConfig

from mtraining_nns import flops
from mtraining_nns.engines.world import World
from mtraining_nns.environment import Process
from mtraining_nns.ops import clock, kernels
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Circle, Exchange, Ring, Swap
from mtraining_nns.plan import trial
from mtraining_nns.plan.constants import Constants, Number, of_device
from mtraining_nns.plan.memory import GIB, memory
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.times import OTHER_BYTES
from mtraining_nns.recipe import Recipe
from mtraining_nns.sections import CheckpointConfig, DataConfig, ModelConfig, ParallelConfig, TrainConfig

DENSITY = 0.05
WARM_UP = 2  # repeats that compile and allocate


@dataclass(frozen=True)
class Sizes:
    """What is measured with; lengths: the shortest and the longest; steps: of the real step."""

    hidden: int = 2048
    intermediate: int = 11008
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 128
    vocabulary: int = 151936
    layers: int = 4
    tokens: int = 16384
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    step_tokens: int = 65536
    copied_bytes: int = 1 << 30
    sent_bytes: tuple[int, int] = (16 << 20, 256 << 20)
    repeats: int = 5


ON_CPU = Sizes(
    hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocabulary=512, layers=2, tokens=256,
    lengths=(128, 256), step_tokens=256, copied_bytes=1 << 22, sent_bytes=(1 << 16, 1 << 20), repeats=1,
)  # fmt: skip


class Calibration:
    """Measures part by part; `constants` then has what was measured and, marked so, what was not."""

    def __init__(self, world: World, sizes: Sizes | None = None):
        self.world, self.device, self.on_gpu = world, world.device, world.device.type == "cuda"
        self.sizes = sizes or (Sizes() if self.on_gpu else ON_CPU)
        self.name = torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.found: dict[str, Number] = {}
        self.rows = [["what", "measured", "of"]]

    def run(self) -> Constants:
        """Everything. Collective."""
        self.products()
        self.copies()
        for backend in self.backends():
            self.attention(backend)
        if self.world.mesh.size() > 1:
            self.links()
        else:
            self.step()
        return self.constants()

    def keep(self, name: str, value: float, source: str) -> None:
        """A measured number; the slowest rank's where a rate, or a time."""
        self.found[name] = Number(value, "measured", source)
        self.rows.append([name, f"{value:.4g}", source])

    def products(self) -> None:
        """Products of a layer and of the head, weighed as a model does."""
        s, dtype = self.sizes, self.dtype
        x = torch.randn(s.tokens, s.hidden, device=self.device, dtype=dtype)
        wide = torch.randn(s.tokens, s.intermediate, device=self.device, dtype=dtype)
        queries = s.heads * s.head_dim
        shapes = {(s.hidden, s.intermediate): 2, (s.intermediate, s.hidden): 1, (s.hidden, queries): 2}
        shapes[s.hidden, s.vocabulary] = 0
        done, seconds = 0.0, 0.0
        for (rows, columns), times in shapes.items():
            weight = torch.randn(rows, columns, device=self.device, dtype=dtype)
            given = x if rows == s.hidden else wide
            given = given[: s.tokens // 16] if columns == s.vocabulary else given
            taken = self.seconds(lambda: given @ weight)  # noqa: B023
            rate = 2 * given.numel() * columns / taken / 1e12
            self.rows.append([f"{given.shape[0]} x {rows} x {columns}", f"{rate:.4g} TFLOP/s", str(dtype)])
            done, seconds = done + times * 2 * given.numel() * columns, seconds + times * taken
        self.keep("matmul_tflops", done / seconds / 1e12, f"products of a layer, {s.tokens} tokens, {dtype}")

    def copies(self) -> None:
        """On the device, and from pinned memory of the host."""
        x = torch.empty(self.sizes.copied_bytes, dtype=torch.uint8, device=self.device)
        y, mib = torch.empty_like(x), self.sizes.copied_bytes >> 20
        self.keep("memory_gb_s", 2 * x.numel() / self.seconds(lambda: y.copy_(x)) / 1e9, f"copy of {mib} MiB")
        host = torch.empty(self.sizes.copied_bytes, dtype=torch.uint8, pin_memory=self.on_gpu)
        taken = self.seconds(lambda: y.copy_(host, non_blocking=True))
        self.keep("host_gb_s", host.numel() / taken / 1e9, f"host to device, {mib} MiB")

    def backends(self) -> list[str]:
        """The one that a plan would take, and triton, which short sequences get."""
        if not self.on_gpu:
            return ["torch"]
        s, here = self.sizes, kernels.Device.here("cuda")
        work = kernels.Work(block=128, head_dim=s.head_dim, heads=s.heads, kv_heads=s.kv_heads, dtype=torch.bfloat16)
        return list(dict.fromkeys([kernels.choose(here, work)[0], "triton"]))

    def attention(self, backend: str) -> None:
        """Rates of the longest length, floors of the shortest, the estimate at both."""
        calls = {}
        for length in self.sizes.lengths:
            for density in (1.0, DENSITY):
                calls[length, density] = call = self.call(backend, length, density)
                kind = "dense" if density == 1 else "sparse"
                for way in ("forward", "backward"):
                    seconds = call[f"attention {way}"]
                    pairs = call["kept"] * self.sizes.heads * length * (length + 1) / 2
                    rate = flops.kernel_flops(self.sizes.head_dim, pairs, backward=way == "backward") / seconds / 1e12
                    text = f"S {length}, {call['kept']:.1%} kept, {1e3 * seconds:.3f} ms"
                    if length == self.sizes.lengths[-1]:
                        self.keep(f"{backend}_{kind}_{way}_tflops", rate, text)
                    else:
                        self.rows.append([f"{backend} {kind} {way}", f"{rate:.4g} TFLOP/s", text])
        short, long = ((length, calls[length, DENSITY]) for length in (self.sizes.lengths[0], self.sizes.lengths[-1]))
        if backend != self.backends()[0]:
            return
        # a single call's kernels at a length too short to fill the device: what the host takes to queue it
        for way in ("forward", "backward"):
            self.keep(f"call_{way}_ms", 1e3 * short[1][f"attention {way}"], f"sparse call at S {short[0]}")
        slope = max(0.0, long[1]["index"] - short[1]["index"]) / (long[0] - short[0]) / self.sizes.heads
        first = max(0.0, short[1]["index"] - slope * short[0] * self.sizes.heads)
        self.keep("index_call_ms", 1e3 * first, f"estimate at S {short[0]} and {long[0]}")
        self.keep("index_ms_per_million", 1e9 * slope, "milliseconds a million local tokens x query heads")
        self.keep("cpu_ms", 0.0, "nothing beyond call_forward_ms")

    def call(self, backend: str, length: int, density: float) -> dict[str, float]:
        """Seconds of the parts of a call by name, and what it kept."""
        s, config = self.sizes, AttentionConfig(backend=backend, block=128 if self.on_gpu else 32)
        operator = Operator(trial.of_density(config, length, density), Ring.single(), self.device.type)
        q, k, v = (
            torch.randn(1, length, heads, s.head_dim, device=self.device, dtype=self.dtype, requires_grad=True)
            for heads in (s.heads, s.kv_heads, s.kv_heads)
        )
        dout, times = torch.randn_like(q), []
        for turn in range(WARM_UP + s.repeats):
            with clock.running(self.device) as found:
                torch.autograd.grad(operator(q, k, v), (q, k, v), dout)
            seconds = found.seconds()
            times += [seconds] if turn >= WARM_UP else []
        medians = {name: statistics.median(turn.get(name, 0.0) for turn in times) for name in times[0] | {"index": 0}}
        return {**medians, "kept": operator.read_stats()["density"][0]}

    def links(self) -> None:
        """Neighbours within a machine, then those as many ranks on as a machine has, if there are several machines."""
        world, nodes = self.world.mesh.size(), [""] * self.world.mesh.size()
        dist.all_gather_object(nodes, (Process.launched() or Process()).node)
        local = nodes.count(nodes[0])
        if len(set(nodes)) == 1:
            self.link("intra", 1)
        elif world > local:
            self.link("inter", local)
        part = torch.zeros(self.sizes.sent_bytes[0], dtype=torch.uint8, device=self.device)
        parts = part.repeat(world)
        taken = self.seconds(lambda: dist.all_gather_into_tensor(parts, part))
        rate = part.numel() * (world - 1) / taken / 1e9
        self.rows.append(["all-gather", f"{rate:.4g} GB/s", f"{world} ranks, {part.numel() >> 10} KiB of each"])

    def link(self, name: str, ahead: int) -> None:
        """All ranks send and receive at once; a line through two sizes."""
        world = self.world.mesh.size()
        circle, taken = Circle(self.world.rank, tuple(range(world)), dist.group.WORLD), []
        for size in self.sizes.sent_bytes:
            sent = torch.zeros(size, dtype=torch.uint8, device=self.device)
            taken.append(self.seconds(partial(_exchange, circle, Swap(sent, torch.empty_like(sent), ahead))))
        small, large = self.sizes.sent_bytes
        per_byte = max(1e-15, (taken[1] - taken[0]) / (large - small))
        text = f"send and receive at once, {small >> 10} and {large >> 10} KiB, {world} ranks"
        self.keep(f"{name}_gb_s", 1 / per_byte / 1e9, text)
        self.keep(f"{name}_latency_ms", 1e3 * max(0.0, taken[0] - small * per_byte), text)

    def step(self) -> None:
        """A real step of a few layers: what is neither product nor attention, and the allocator."""
        s = self.sizes
        recipe, config = self.recipe(), self.config()
        found = trial.run(recipe, config, self.world, warmup=2)
        seconds = found.seconds
        parts = ("loss", "index", "attention forward")
        # attention and index of the forward pass alone: recomputation runs within "backward" and doubles the former
        again = 2 if recipe.train.recompute else 1
        layers = seconds["forward"] - seconds["loss"] - seconds.get("index", 0.0) - seconds[parts[2]] / again
        products = s.step_tokens * flops.linear_flops(found.shape) / self.found["matmul_tflops"].value / 1e12
        units = s.hidden, (s.heads + s.kv_heads) * s.head_dim, s.intermediate
        element = 2 if self.on_gpu else 4
        moved = s.step_tokens * s.layers * element / 2
        moved *= sum(each * unit for each, unit in zip(OTHER_BYTES["torch"], units))
        text = f"step of {s.layers} layers, {s.step_tokens} tokens: {layers:.4f} s forward, {products:.4f} of products"
        if layers > products:
            self.keep("memory_gb_s", moved / (layers - products) / 1e9, text)
        self.rows.append(["a step", f"{seconds['step']:.4f} s", text])
        if self.on_gpu:
            self.memory_of(found, recipe)

    def memory_of(self, found: trial.Trial, recipe: Recipe) -> None:
        """The allocator's part, and how the plan's peak compares."""
        peak = max(found.peaks.values())
        self.keep("allocator_share", max(0.0, found.reserved_bytes / peak - 1), f"reserved over {peak / GIB:.1f} GiB")
        free, total = torch.cuda.mem_get_info(self.device)
        context = total - free - torch.cuda.memory_reserved(self.device)
        self.keep("memory_gib", total / GIB, "torch.cuda.mem_get_info")
        self.keep("context_gib", max(0, context) / GIB, "used, but not by tensors; one rank, without NCCL")
        setting = Setting(
            recipe=recipe, shape=found.shape, world=1, node=1, backend=self.backends()[0], density=found.kept
        )
        planned = memory(setting).tensors
        self.rows.append(
            ["peak of the step", f"{peak / GIB:.2f} GiB", f"plan {planned / GIB:.2f}, ratio {planned / peak:.3f}"]
        )

    def recipe(self) -> Recipe:
        """Of the real step."""
        s = self.sizes
        attention = AttentionConfig(block=128 if self.on_gpu else 32)
        precision = "bf16" if self.on_gpu else "fp32"
        recipe = Recipe(
            model=ModelConfig(path="random", dtype="bfloat16" if self.on_gpu else "float32"),
            data=DataConfig(path="random"),
            train=TrainConfig(steps=1, seq_len=s.step_tokens, lr=1e-5, precision=precision),
            checkpoint=CheckpointConfig(dir="none"),
            attention=trial.of_density(attention, s.step_tokens, DENSITY),
            parallel=ParallelConfig(cp=1),
        )
        return replace(recipe, attention=recipe.attention.resolved())

    def config(self):
        """transformers config of the real step."""
        s = self.sizes
        return AutoConfig.for_model(
            "qwen2", hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
            num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, vocab_size=s.vocabulary, head_dim=s.head_dim,
            tie_word_embeddings=True, max_position_embeddings=s.step_tokens,
        )  # fmt: skip

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of some repeats after two, the slowest rank's."""
        times = []
        for turn in range(WARM_UP + self.sizes.repeats):
            if self.on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if self.on_gpu:
                torch.cuda.synchronize()
            times += [time.perf_counter() - began] if turn >= WARM_UP else []
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=self.device)
        return self.world.max(slowest).item()

    def constants(self) -> Constants:
        """What was measured; the rest is the packaged numbers of this GPU, or of another one, and says so."""
        known = of_device(self.name)
        base = known or Constants.of("h200" if self.on_gpu else "a100-40gb")
        numbers = {}
        for name, number in base.numbers.items():
            source = number.source if known else f"of {base.gpu}, not of this device: {number.source}"
            numbers[name] = Number(number.value, "assumed", source)
        if known is None:
            source = "unknown, the rate of products stands for it"
            numbers["peak_tflops"] = Number(self.found["matmul_tflops"].value, "assumed", source)
        capability = torch.cuda.get_device_capability(self.device) if self.on_gpu else (0, 0)
        match = base.match if known else self.name
        return Constants(
            gpu=self.name, match=match, capability=capability, gpus_per_node=base.gpus_per_node,
            numbers=numbers | self.found,
        )  # fmt: skip


def _exchange(circle: Circle, swap: Swap) -> None:
    exchange = Exchange(circle, "calibrating")
    exchange.start(swap)
    exchange.wait()
