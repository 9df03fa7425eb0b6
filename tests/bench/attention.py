"""Time of sparse attention, one aligned row a case and backend.

    python tests/bench/attention.py                    the standard pattern at S = 131072
    python tests/bench/attention.py --grid             lengths, heads, head dims and densities
    python tests/bench/attention.py --ring             one hop of a ring of 8, 4K to 64K queries against as many keys
    python tests/bench/attention.py --short            8K to 64K, index included, against the dense operator
    python tests/bench/attention.py --sweep            tile sizes, to choose the table in ops/kernels/triton.py

Forward and backward are the operator's own passes with the index given: block lists, the gathering of columns and
every cast are inside. Index is what comes before: the estimate and its budgets. TFLOP/s count 4 * D * kept pairs
forward and 2.5 times that backward; `dense` is FlashAttention-4's causal attention in the same run,
`limit` the same kept pairs at its rate. Times are medians of CUDA events. Errors are RMS ratios of out and dq
against fp64 over sampled rows.
"""

import argparse
import functools
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import triton.testing
from standard_pattern import pattern_index, standard_pattern

from mtraining_nns.ops import kernels
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import DistanceIndex
from mtraining_nns.ops.kernels import Keys, Tape
from mtraining_nns.ops.kernels import triton as triton_kernels
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.lists import block_lists, column_tiles
from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.ring import Ring

sys.path.insert(0, str(Path(__file__).parents[1]))
from direct import BLOCK, Indexed, random_inputs, results  # noqa: E402
from helpers import operator_of  # noqa: E402

SHAPES = {  # query rows, key rows
    "forward": [(128, 128), (128, 64), (64, 64), (128, 32), (64, 128)],
    "dq": [(128, 128), (128, 64), (64, 64), (128, 32)],
    "dkv": [(64, 128), (32, 128), (64, 64), (128, 64)],
}


@dataclass(frozen=True)
class Shape:
    seq_len: int = 131072
    heads: int = 16
    kv_heads: int = 2
    dim: int = 128

    def __str__(self):
        return f"S {self.seq_len:7d}  {self.heads:2d}/{self.kv_heads}  d {self.dim:3d}"

    def inputs(self, device="cuda"):
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        return random_inputs(self.seq_len, self.heads, self.kv_heads, self.dim, device, dtype)


def standard_index(seq_len: int, heads: int, density: float | None = None, device="cuda") -> DistanceIndex:
    """The standard pattern, or one of the same kind that keeps about `density` of the causal pairs."""
    settings = {} if density is None else of_density(seq_len, density)
    return pattern_index(*standard_pattern(seq_len, heads, **settings), seq_len, BLOCK, device)


def of_density(seq_len: int, density: float) -> dict[str, int]:
    """Settings of the standard pattern: a sixth of the kept pairs in columns, a tenth in the local band."""
    local = max(BLOCK, int(seq_len * density / 20) // BLOCK * BLOCK)
    # a far band of 64 distances keeps two block diagonals, on average half as long as the sequence
    clusters = max(1, round(seq_len / BLOCK * (density * 5 / 6 - 2 * local / seq_len) / 2))
    return {"verticals": max(BLOCK, int(seq_len * density / 12)), "local": local, "clusters": clusters}


def median_ms(fn) -> float:
    return triton.testing.do_bench(fn, warmup=50, rep=300, return_mode="median")


def passes_ms(operator, inputs) -> tuple[float, float]:
    """Forward and backward."""
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = operator(*leaves)
    backward = median_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    with torch.no_grad():
        return median_ms(lambda: operator(*leaves)), backward


def flash_attention_4(q, k, v):
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True)
    return out[0] if isinstance(out, tuple) else out


def backends() -> list[str]:
    work, here = kernels.Work(block=BLOCK), kernels.Device.here
    names = ("triton", "cuda", "cute")
    return [name for name in names if not kernels.backends.FAULTS[name](here("cuda", name), work)]


def errors(operator, inputs, index: DistanceIndex, samples: int = 12) -> str:
    """RMS ratios of out and dq over sampled rows of the first and the last head."""
    got, direct = results(operator, inputs), Indexed(index, inputs)
    length, heads = inputs[0].shape[1:3]
    rows = torch.randint(length, (samples,), generator=torch.Generator().manual_seed(1)).tolist() + [length - 1]
    pairs = list(itertools.product((0, heads - 1), rows))
    expected = [direct.row(n, r) for n, r in pairs]
    ratios = []
    for name in ("out", "dq"):  # each row by itself: early ones, which average few values, are the largest
        ours = torch.stack([got[name][0, r, n].double() for n, r in pairs])
        theirs = torch.stack([row[name] for row in expected])
        ratios.append(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-9)).square().mean().sqrt())
    return " ".join(f"{x:.1e}" for x in ratios)


@functools.cache
def dense_ms(shape: Shape) -> tuple[float, float]:
    """FlashAttention-4's causal attention, where it is installed."""
    return passes_ms(flash_attention_4, shape.inputs()) if "cute" in backends() else (float("nan"),) * 2


def report(shape: Shape, index: DistanceIndex, label: str = "") -> None:
    """The rows of one shape and pattern."""
    inputs = shape.inputs()
    density = index.density(shape.seq_len).item()
    pairs = density * shape.heads * shape.seq_len * (shape.seq_len + 1) / 2
    flop = 4 * shape.dim * pairs / 1e9
    dense = dense_ms(shape)
    limit = [ms * density for ms in dense]
    name = f"{shape}  {density:6.2%} {label}"
    print(f"{name}  dense    {dense[0]:8.3f} {dense[1]:8.3f}  limit {limit[0]:7.3f} {limit[1]:7.3f}", flush=True)
    for backend in backends():
        operator = operator_of(index, device_type="cuda", backend=backend)
        ms = passes_ms(operator, inputs)
        rates = f"{flop / ms[0]:5.0f} {2.5 * flop / ms[1]:5.0f} TFLOP/s"
        share = sum(ms) / sum(limit)
        print(
            f"{name}  {backend:8s} {ms[0]:8.3f} {ms[1]:8.3f}  {rates}  {share:5.2f} x limit"
            f"  1/{sum(dense) / sum(ms):5.1f} of dense  error {errors(operator, inputs, index)}",
            flush=True,
        )


def standard() -> None:
    for shape in (Shape(), Shape(131072, 9, 3, 64), Shape(131072, 32, 8, 64)):
        report(shape, standard_index(shape.seq_len, shape.heads))
    index_cost(Shape())


def index_cost(shape: Shape) -> None:
    """Estimate with budgets, and the lists of both passes."""
    q, k, *_ = shape.inputs()
    given = standard_index(shape.seq_len, shape.heads)
    place, config = Place(Layout(seq_len=shape.seq_len, block=BLOCK), Ring.single()), AttentionConfig()
    starts = place.layout.block_starts(0, "cuda")

    def estimate():
        return vertical_slash.build(q, k, place, config, shape.dim**-0.5)

    def lists(index, both: bool):
        return block_lists(index, starts, starts, diagonal=True, by_key=both), column_tiles(index.columns, starts)

    rows = {
        "estimate, top-p": estimate,
        "lists forward": lambda: lists(given, False),
        "lists backward": lambda: lists(given, True),
        "all of it": lambda: [lists(index, both) for index in (estimate(),) for both in (False, True)],
    }
    for name, run in rows.items():
        print(f"{shape}  {name:24s}{median_ms(run):8.3f} ms", flush=True)


def grid() -> None:
    many = [(16, 2, 128), (28, 4, 128), (32, 8, 128), (32, 8, 64), (9, 3, 64)]
    for seq_len, (heads, kv_heads, dim) in itertools.product((8192, 16384, 32768, 131072, 262144), many):
        for density in (0.02, 0.05, 0.1, 0.25) if (heads, dim) == (16, 128) else (0.05,):
            report(Shape(seq_len, heads, kv_heads, dim), standard_index(seq_len, heads, density))


def ring() -> None:
    """One hop of a striped ring of 8: queries of a rank against the keys of another one, without columns."""
    for local, density in itertools.product((4096, 16384, 65536), (0.02, 0.05, 0.1, 0.25)):
        hop(Shape(8 * local), density)
    hop(Shape(131072, 32, 8, 128), 0.05)
    hop(Shape(131072, 9, 3, 64), 0.05)


def hop(shape: Shape, density: float) -> None:
    """The rows of one shape: each backend alone, then forward by one and backward by another is the sum of two."""
    layout, scale = Layout(seq_len=shape.seq_len, world=8, block=BLOCK), shape.dim**-0.5
    index = standard_index(shape.seq_len, shape.heads, density)
    local = Shape(layout.local_len, shape.heads, shape.kv_heads, shape.dim)
    q, k, v, dout = local.inputs()
    starts = [layout.block_starts(rank, "cuda") for rank in (3, 1)]

    def keys(both: bool) -> Keys:
        return Keys(k, v, block_lists(index, *starts, diagonal=False, by_key=both))

    flop = 4 * shape.dim * keys(False).blocks.by_query.count.sum().item() * BLOCK**2 / 1e9
    for backend in backends():
        module = kernels.load(backend)
        out, lse = module.forward(q, keys(False), scale=scale, into=torch.empty_like(q))
        tape, carry = Tape(dout, out, lse, scale), (out.float(), lse)
        dq = module.begin(q, tape)
        ms = (
            median_ms(lambda: module.forward(q, keys(False), scale=scale, carry=carry)),  # noqa: B023
            median_ms(lambda: module.backward(q, keys(True), tape, carry=dq)),  # noqa: B023
        )
        rates = f"{flop / ms[0]:5.0f} {2.5 * flop / ms[1]:5.0f} TFLOP/s"
        print(f"hop of {local}  {density:4.0%}  {backend:8s} {ms[0]:8.3f} {ms[1]:8.3f}  {rates}", flush=True)


def short() -> None:
    """Sparse against the dense operator and FlashAttention-4 alone, index included."""
    for seq_len, dim_heads in itertools.product((8192, 16384, 32768, 65536), ((16, 2, 128), (9, 3, 64))):
        shape = Shape(seq_len, *dim_heads)
        inputs = shape.inputs()
        rows = {
            "dense FlashAttention-4": flash_attention_4,
            "dense operator": Operator(AttentionConfig(pattern="dense"), Ring.single(), "cuda"),
        }
        for density in (0.05, 0.25, 0.5):
            settings = of_density(seq_len, density)
            config = AttentionConfig(
                budget="fixed",
                k_v=settings["verticals"],
                k_s=settings["clusters"],
                local=settings["local"],
                cap=settings["verticals"],
            )
            rows[f"sparse {density:.0%}"] = Operator(config, Ring.single(), "cuda")
        for name, run in rows.items():
            ms = passes_ms(run, inputs)
            kept = run.last[0][0].density(seq_len).item() if isinstance(run, Operator) else 1.0
            print(f"{shape}  {name:24s} {kept:4.0%} {ms[0]:8.3f} {ms[1]:8.3f}  sum {sum(ms):8.3f}", flush=True)


def sweep(shape: Shape) -> None:
    """Every tile size of one kernel with the others as they are; the whole pass is timed."""
    inputs, index = shape.inputs(), standard_index(shape.seq_len, shape.heads)
    operator = operator_of(index, device_type="cuda", backend="triton")
    for kernel, shapes in SHAPES.items():
        best = triton_kernels.TILES[kernel, shape.dim]
        results = []
        for (rows_, keys), warps, stages in itertools.product(shapes, (4, 8), (2, 3, 4)):
            tiles = triton_kernels.Tiles(rows_, keys, warps, stages)
            triton_kernels.TILES[kernel, shape.dim] = tiles
            try:
                ms = passes_ms(operator, inputs)[kernel != "forward"]
            except Exception as error:  # noqa: BLE001  a tile size that does not fit the chip is a result, too
                print(f"{kernel:8s}{tuple(tiles)!s:20s} {type(error).__name__}")
                continue
            results.append((ms, tiles))
        triton_kernels.TILES[kernel, shape.dim] = min(results)[1] if results else best
        for ms, tiles in sorted(results)[:6]:
            print(f"{kernel:8s}{tuple(tiles)!s:24s}{ms:8.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("grid", "ring", "short", "sweep"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--dim", type=int, default=128, choices=(64, 128), help="head dim of --sweep")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"needs a CUDA device, torch {torch.__version__} sees none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    if args.sweep:
        sweep(Shape(131072, 9, 3, 64) if args.dim == 64 else Shape())
    chosen = [run for run in (grid, ring, short) if getattr(args, run.__name__)]
    for run in chosen or [] if args.sweep else chosen or [standard]:
        run()


if __name__ == "__main__":
    main()
