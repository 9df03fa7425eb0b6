"""Time of the attention kernels on the standard pattern, one aligned row a case.

    python tests/bench/attention.py                         S = 131072, 16/2 heads, d 128
    python tests/bench/attention.py --seq 32768 --heads 9 --kv-heads 3 --dim 64
    python tests/bench/attention.py --sweep                 tile sizes, to choose the table in ops/kernels/triton.py

TFLOP/s count 4 * D * kept pairs forward and 2.5 times that backward. Times are medians of CUDA events. The index is
given; its cost, estimate and lists apart, stands in rows of its own.
"""

import argparse
import itertools

import torch
import triton.testing
from standard_pattern import slash_block_mask, standard_pattern

from mtraining_nns.ops import kernels
from mtraining_nns.ops.attention import Call, _backward, _forward
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import ColumnIndex, DistanceIndex
from mtraining_nns.ops.kernels import Tape
from mtraining_nns.ops.kernels import triton as triton_kernels
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.ring import Ring
from mtraining_nns.ops.store import IndexStore

SHAPES = {  # query rows, key rows
    "forward": [(128, 128), (128, 64), (64, 64), (128, 32)],
    "dq": [(128, 128), (128, 64), (64, 64), (128, 32)],
    "dkv": [(64, 128), (32, 128), (64, 64), (128, 64)],
}


def standard_index(seq_len: int, heads: int, block: int, device) -> DistanceIndex:
    """The standard pattern as the index that the operator would build."""
    position, offsets = standard_pattern(seq_len, heads)
    # block diagonals do not depend on the row, so the last block row shows them all
    blocks = seq_len // block
    hit = torch.zeros(1, heads, blocks, dtype=torch.bool)
    for head, kept in enumerate(offsets):
        for edge in (kept // block, (kept + block - 1) // block):
            hit[0, head, edge[edge < blocks]] = True
    assert seq_len > 8192 or torch.equal(hit[0].flip(-1), slash_block_mask(offsets, seq_len, block)[:, -1])
    position, count = (
        position[None].to(device),
        torch.full((1, heads), position.shape[1], dtype=torch.int32, device=device),
    )
    hit = hit.to(device)
    return DistanceIndex(
        hit=hit, block=block, columns=ColumnIndex(position=position, count=count, hit=hit, block=block)
    )


def median_ms(fn) -> float:
    return triton.testing.do_bench(fn, warmup=100, rep=400, return_mode="median")


def prepared(index: DistanceIndex, call: Call):
    """The call with its block lists built once, so that only kernels are timed."""
    lists = index.blocks(call.q_starts, call.q_starts)
    transposed = lists.transpose()

    class Given:
        columns = index.columns
        hit = index.hit

        @staticmethod
        def blocks(q_starts, k_starts):
            return lists

    object.__setattr__(lists, "transpose", lambda: transposed)
    return Call(Given, call.place, call.kernels, call.scale, call.store, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    make = lambda n: torch.randn(1, args.seq, n, args.dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v, dout = make(args.heads), make(args.kv_heads), make(args.kv_heads), make(args.heads)
    index = standard_index(args.seq, args.heads, args.block, "cuda")
    place = Place(Layout(seq_len=args.seq, block=args.block), Ring.single())
    call = Call(index, place, kernels.load("triton"), args.dim**-0.5, IndexStore(), None)
    pairs = index.kept_pairs(call.q_starts, args.seq).item()
    print(
        f"S={args.seq} heads={args.heads}/{args.kv_heads} d={args.dim} block={args.block} "
        f"density={index.density(args.seq).item():.4%} {torch.cuda.get_device_name()} torch {torch.__version__}"
    )
    if args.sweep:
        sweep(q, k, v, dout, prepared(index, call), pairs)
    else:
        rows(q, k, v, dout, index, call, pairs)


def tape_of(q, k, v, dout, call: Call) -> Tape:
    out, lse = _forward(q, k, v, call)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    return Tape(dout, lse, delta, call.scale)


def report(name: str, ms: float, flop: float | None = None) -> None:
    rate = "" if flop is None else f"{flop / ms / 1e9:9.0f} TFLOP/s"
    print(f"{name:42s}{ms:9.3f} ms{rate}", flush=True)


def rows(q, k, v, dout, index: DistanceIndex, call: Call, pairs: float) -> None:
    flop = 4 * q.shape[3] * pairs
    given = prepared(index, call)
    tape = tape_of(q, k, v, dout, given)
    report("forward, index given", median_ms(lambda: _forward(q, k, v, given)), flop)
    report("backward, index given", median_ms(lambda: _backward(q, k, v, tape, given)), 2.5 * flop)
    report("forward with lists", median_ms(lambda: _forward(q, k, v, call)))
    report("backward with lists", median_ms(lambda: _backward(q, k, v, tape, call)))
    config = AttentionConfig(block=index.block)
    report("estimate, top-p", median_ms(lambda: vertical_slash.build(q, k, call.place, config, call.scale)))
    report("block lists", median_ms(lambda: index.blocks(call.q_starts, call.q_starts)))


def sweep(q, k, v, dout, call: Call, pairs: float) -> None:
    """Every tile size of one kernel with the others as they are; the whole pass is timed."""
    tape = tape_of(q, k, v, dout, call)
    flop = 4 * q.shape[3] * pairs
    for kernel, shapes in SHAPES.items():
        best = triton_kernels.TILES[kernel, q.shape[3]]
        results = []
        for (rows_, keys), warps, stages in itertools.product(shapes, (4, 8), (2, 3)):
            tiles = triton_kernels.Tiles(rows_, keys, warps, stages)
            triton_kernels.TILES[kernel, q.shape[3]] = tiles
            run = (lambda: _forward(q, k, v, call)) if kernel == "forward" else (lambda: _backward(q, k, v, tape, call))
            try:
                run()
                torch.cuda.synchronize()
                ms = triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")
            except Exception as error:  # a tile size that does not fit the chip is a result, too
                print(f"{kernel:8s}{tuple(tiles)!s:20s} {type(error).__name__}")
                continue
            results.append((ms, tiles))
        triton_kernels.TILES[kernel, q.shape[3]] = min(results)[1] if results else best
        for ms, tiles in sorted(results)[:6]:
            report(f"{kernel:8s}{tuple(tiles)!s}", ms, flop * (1 if kernel == "forward" else 2.5))


if __name__ == "__main__":
    main()
