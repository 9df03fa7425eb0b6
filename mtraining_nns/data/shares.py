"""Weights to an order: which domain each visit of a run reads, from the number of the visit alone.

    weights 0.5 0.3 0.2  ->  a period of 10 visits  0 1 0 2 0 1 0 2 1 0  ->  visit 23 is the second of domain 0 in its
                                                                             third period, and its 12th of the run

Unit q of a domain with `a` of `P` visits may come from visit floor(q P / a) on and must have come before visit
ceil((q + 1) P / a). Earliest deadline first meets all of them (the windows of Pfair scheduling, Baruah et al. 1996), so
after any number of visits every domain is less than one visit from its share. Whole numbers only: no rounding to drift.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from mtraining_nns.errors import UserError

LONGEST_PERIOD = 1 << 20


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Visits of each domain in a period: whole numbers in the proportion of the weights.

    Exact where their decimals allow a period of LONGEST_PERIOD visits, else rounded to that. UserError for a weight
    that then has no visit.

    >>> whole_shares([0.5, 0.3, 0.2]), whole_shares([2, 1])
    ((5, 3, 2), (2, 1))
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    visits = [int(share * LONGEST_PERIOD) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda d: visits[d] - shares[d] * LONGEST_PERIOD)
    for domain in by_rest[: LONGEST_PERIOD - sum(visits)]:
        visits[domain] += 1
    if 0 in visits:
        small = weights[visits.index(0)]
        raise UserError(
            f"a weight of {small} is below one in {LONGEST_PERIOD} of all; raise it or leave its folder out"
        )
    common = math.gcd(*visits)
    return tuple(count // common for count in visits)


@lru_cache(maxsize=4)
def period(visits: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each visit in a period: its domain, and how many earlier ones in the period are of the same domain."""
    length, turns = sum(visits), [0] * len(visits)
    domain, turn = np.empty(length, np.int32), np.empty(length, np.int32)
    waiting, ready = [(0, number) for number in range(len(visits))], []
    for slot in range(length):
        while waiting and waiting[0][0] <= slot:
            number = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(turns[number] + 1) * length // visits[number]), number))
        number = heapq.heappop(ready)[1]
        domain[slot], turn[slot] = number, turns[number]
        turns[number] += 1
        if turns[number] < visits[number]:
            heapq.heappush(waiting, (turns[number] * length // visits[number], number))
    return domain, turn


def domain_of(visit: int, visits: tuple[int, ...]) -> tuple[int, int]:
    """(domain, its visits before this one) of a visit counted from 0."""
    domain, turn = period(visits)
    periods, slot = divmod(visit, len(domain))
    number = int(domain[slot])
    return number, periods * visits[number] + int(turn[slot])


def counts(before: int, visits: tuple[int, ...]) -> list[int]:
    """Visits of each domain among the first `before`."""
    domain, _ = period(visits)
    periods, slot = divmod(before, len(domain))
    part = np.bincount(domain[:slot], minlength=len(visits)).tolist()
    return [periods * whole + some for whole, some in zip(visits, part)]
