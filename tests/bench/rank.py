"""Compute of one rank of a ring, on one GPU: what hops cost beside the transfers.

    python tests/bench/rank.py                        S 262144 and 524288, 16/2, d 128, standard pattern, 2 to 16 ranks
    python tests/bench/rank.py --seq-len 131072 --worlds 2 4 --heads 32/8 --dim 64 --backend triton

Every transfer is a copy on the GPU: the keys of other ranks are this rank's own. Only times mean anything. `x ideal` is
the time over one GPU's time with the whole sequence divided by the ranks. Medians, a layer.
"""

import argparse
from dataclasses import replace

import torch
from attention import Shape, operator_of, standard_index
from ring import passes, step_ms

from mtraining_nns.ops import homeward, hops
from mtraining_nns.ops.config import LAYOUTS
from mtraining_nns.ops.ring import MODES, Pending, Ring


class Copies:
    """An Exchange with nobody: what is sent arrives."""

    def __init__(self, circle, what: str):
        pass

    def start(self, *swaps) -> None:
        for swap in swaps:
            swap.receive.copy_(swap.send)

    def wait(self) -> None:
        pass


class Alone(Ring):
    """A rank whose sums over the ring are its own."""

    def start_sum(self, x: torch.Tensor) -> Pending:
        return Pending(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, nargs="+", default=(262144, 524288))
    parser.add_argument("--worlds", type=int, nargs="+", default=(2, 4, 8, 16))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--heads", default="16/2", help="query heads / key heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layout", choices=LAYOUTS, default="striped")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    hops.Exchange = homeward.Exchange = Copies
    heads, kv_heads = map(int, args.heads.split("/"))
    for seq_len in args.seq_len:
        shape, index = Shape(seq_len, heads, kv_heads, args.dim), standard_index(seq_len, heads)
        settings = {"layout": args.layout, "backend": args.backend, "device_type": "cuda"}
        alone = step_ms(passes(operator_of(index, **settings), shape.inputs(), seq_len))
        print(f"{shape}  one GPU            {alone[0]:8.2f} {alone[1]:8.2f}", flush=True)
        for world in args.worlds:
            inputs = replace(shape, seq_len=seq_len // world).inputs()
            for mode in args.modes:
                ring = Alone(world // 2, tuple(range(world)), mode=mode)
                operator = operator_of(index, ring, **settings)
                operator._agree = lambda *sizes: None
                ms = step_ms(passes(operator, inputs, seq_len))
                ratios = [mine * world / whole for mine, whole in zip(ms, alone)]
                print(
                    f"{shape}  rank of {world:2d} {mode:6s} {ms[0]:8.2f} {ms[1]:8.2f}"
                    f"  x ideal {ratios[0]:.3f} {ratios[1]:.3f}  sum {sum(ms) * world / sum(alone):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
