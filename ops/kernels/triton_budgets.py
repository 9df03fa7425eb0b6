"""Device code of the budgets: the fewest largest masses of a head that reach a share, found without sorting.

    1. the crossing mass    the largest value t such that the masses >= t suffice, by bisection over the bits of floats,
                            which are ordered like the floats; sums in fp64
    2. the ties             how many masses equal to t are needed beside the larger ones; the first ones are taken
    3. one walk             kept entries in ascending order, so that lists come out sorted

One program a head. Masses are not negative; padding is, and is never kept. Infinity and NaN count as 0: they come of a
run that has diverged, whose lists must be lists all the same.
"""

import torch
import triton
import triton.language as tl

from mtraining_nns.ops.index import NO_COLUMN

CHUNK = 4096  # masses at once
LARGEST = tl.constexpr(0x7F7FFFFF)  # bits of the largest finite mass


@triton.jit
def mass_bits(MASS, first, count, CHUNK: tl.constexpr):
    """(bits int32, mass fp64) of a chunk; negative and 0 for what does not count."""
    places = first + tl.arange(0, CHUNK)
    mass = tl.load(MASS + places, mask=places < count, other=-1.0)
    bits = mass.to(tl.int32, bitcast=True)
    bits = tl.where(bits > LARGEST, 0, bits)
    return bits, tl.where(bits > 0, mass, 0.0).to(tl.float64)


@triton.jit
def above(MASS, count, threshold, CHUNK: tl.constexpr):
    """(sum fp64, number) of the masses whose bits reach the threshold."""
    total, number = tl.zeros([CHUNK], tl.float64), tl.zeros([CHUNK], tl.int32)
    for first in range(0, count, CHUNK):
        bits, mass = mass_bits(MASS, first, count, CHUNK)
        taken = bits >= threshold
        total += tl.where(taken, mass, 0.0)
        number += taken.to(tl.int32)
    return tl.sum(total, 0), tl.sum(number, 0)


@triton.jit
def crossing(MASS, count, wanted, most, CHUNK: tl.constexpr):
    """(bits of the crossing mass, how many equal ones are kept, sum of what is kept fp64)."""
    low, high = tl.full([], 0, tl.int64), tl.full([], LARGEST, tl.int64)
    for _ in range(0, 31):
        middle = (low + high + 1) // 2
        total, number = above(MASS, count, middle.to(tl.int32), CHUNK)
        enough = (total >= wanted) | (number >= most)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    threshold = low.to(tl.int32)
    larger, taken = above(MASS, count, threshold + 1, CHUNK)
    total, number = above(MASS, count, threshold, CHUNK)
    value = (total - larger) / tl.maximum(number - taken, 1)
    # compared as numbers of ties, so that infinite wishes and masses of 0 need no case of their own
    missing = tl.where(value > 0.0, (wanted - larger) / tl.where(value > 0.0, value, 1.0), float("inf"))
    needed = tl.minimum(tl.ceil(tl.minimum(missing, 2147483000.0)).to(tl.int32), number - taken)
    ties = tl.minimum(tl.maximum(needed, 1), most - taken)
    return threshold, ties, larger + ties * value


@triton.jit
def columns_kernel(
    MASS, BEST, POSITION, OUT, COUNT, CAPPED, wanted, most, S, K, sinks, C, NOTHING,
    HAS_POSITION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    threshold, ties, total = crossing(BEST + head * K, K, wanted, most, CHUNK)
    kept, tied = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, S, CHUNK):
        places = first + tl.arange(0, CHUNK)
        bits, _mass = mass_bits(MASS + head * S, first, S, CHUNK)
        equal = (bits == threshold).to(tl.int32)
        rank = tied + tl.cumsum(equal, 0)
        position = places
        if HAS_POSITION:
            position = tl.load(POSITION + head * S + places, mask=places < S, other=NOTHING)
        # sinks stand in front of the list whether their mass is large or not
        taken = ((bits > threshold) | ((equal != 0) & (rank <= ties))) & (position >= sinks)
        slot = sinks + kept + tl.cumsum(taken.to(tl.int32), 0) - 1
        taken = taken & (slot < C)
        tl.store(OUT + head * C + slot, position, mask=taken)
        kept += tl.sum(taken.to(tl.int32), 0)
        tied += tl.sum(equal, 0)
    for first in range(0, sinks, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        tl.store(OUT + head * C + slot, slot, mask=slot < sinks)
    for first in range(sinks + kept, C, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        tl.store(OUT + head * C + slot, tl.zeros([CHUNK], tl.int32) + NOTHING, mask=slot < C)
    tl.store(COUNT + head, sinks + kept)
    tl.store(CAPPED + head, (total < wanted).to(tl.int32))


@triton.jit
def slashes_kernel(
    BINS, KEPT, share, budget, n, bins, near, FIXED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    total, _number = above(BINS + head * n, bins, 0, CHUNK)
    wanted = total * share
    most = bins
    if FIXED:
        wanted, most = total * 0.0 + float("inf"), tl.minimum(budget, bins)
    threshold, ties, _sum = crossing(BINS + head * n, bins, wanted, most, CHUNK)
    tied = tl.full([], 0, tl.int32)
    for first in range(0, n, CHUNK):
        places = first + tl.arange(0, CHUNK)
        bits, _mass = mass_bits(BINS + head * n, first, bins, CHUNK)
        equal = (bits == threshold).to(tl.int32)
        kept = (bits > threshold) | ((equal != 0) & (tied + tl.cumsum(equal, 0) <= ties)) | (places < near)
        tl.store(KEPT + head * n + places, kept.to(tl.int8), mask=places < n)
        tied += tl.sum(equal, 0)


def columns(mass, best, position, *, wanted: float, most: int, sinks: int, width: int):
    """(position int32 [B, N, width], count int32 [B, N], short of the wish int32 [B, N]).

    mass: fp32 [B, N, M] in ascending order of position, which is int32 [B, N, M], or the place itself if None.
    best: its largest entries in any order, `most` or more of them where there are as many.
    Kept are the fewest largest that reach `wanted`, at most `most`, and the first `sinks` positions.
    """
    batch, heads, length = mass.shape
    out = torch.empty(batch, heads, width, dtype=torch.int32, device=mass.device)
    count, short = (torch.empty(batch, heads, dtype=torch.int32, device=mass.device) for _ in range(2))
    columns_kernel[(batch * heads,)](
        mass, best.contiguous(), mass if position is None else position, out, count, short, wanted, most, length,
        best.shape[-1], sinks, width, NO_COLUMN, HAS_POSITION=position is not None, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return out, count, short


def slashes(bins, *, used: int, share: float, budget: int | None, near: int):
    """bool [B, N, n]: the fewest largest of the first `used` bins that reach their share, or `budget` of them, and all
    below `near`. bins: fp32 [B, N, n] contiguous.
    """
    kept = torch.empty(bins.shape, dtype=torch.int8, device=bins.device)
    slashes_kernel[(bins.shape[0] * bins.shape[1],)](
        bins, kept, float("inf") if share == 1.0 else share, budget or 0, bins.shape[-1], used, near,
        FIXED=budget is not None, CHUNK=min(CHUNK, triton.next_power_of_2(bins.shape[-1])), num_warps=4,
    )  # fmt: skip
    return kept.view(torch.bool)
