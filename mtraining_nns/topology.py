"""Which ranks of a ring stand on one node, and what ring that makes: flat, or circles within and between nodes.

nodes a a a a b b b b, cp 8      hierarchical, inner 4
nodes a a a a b b b b, cp 4      flat: no ring leaves its node
nodes a a b b b, cp 5            flat: nodes hold 2 and 3 ranks; asked for hierarchical, an error

Within a node keys are gathered by default: each hop costs a pass over queries and sums, so one hop with the keys of all
ranks beats many (docs/benchmarks.md).
"""

import itertools
from typing import NamedTuple

from mtraining_nns.errors import UserError


class Shape(NamedTuple):
    """inner: ranks of an inner circle, None for a flat ring; and why."""

    inner: int | None
    reason: str


def ring_shape(parallel, nodes: list[str]) -> Shape:
    """What `parallel.ring` and `parallel.inner` mean for ranks on these nodes; raises UserError.

    parallel: a resolved ParallelConfig. nodes: the node of every rank.
    """
    if parallel.ring == "flat" or parallel.cp == 1:
        return Shape(None, "asked for" if parallel.ring == "flat" else "a ring of one")
    rings = _rings(parallel, nodes)
    if parallel.inner is not None:
        _check_inner(parallel.inner, rings)
        return Shape(parallel.inner, f"parallel.inner={parallel.inner}")
    runs = [_runs(ring) for ring in rings]
    sizes = {size for ring in runs for _, size in ring}
    several = all(len(ring) > 1 for ring in runs)
    if several and len(sizes) == 1 and sizes != {1} and not any(_returns(ring) for ring in runs):
        return Shape(sizes.pop(), f"{len(runs[0])} nodes")
    named = "; ".join(sorted({", ".join(f"{node} {size}" for node, size in ring) for ring in runs}))
    if parallel.ring == "hierarchical":
        raise UserError(
            "parallel.ring=hierarchical needs every ring on several nodes with as many neighbouring ranks, two or more,"
            f" on each; ranks by node are {named}; launch as many processes on each node, set parallel.inner or take"
            " parallel.ring=flat"
        )
    return Shape(None, f"ranks by node are {named}")


def inner_mode(parallel, inner: int | None, nodes: list[str]) -> str:
    """How keys get around an inner circle of `inner` ranks, or a flat ring: one of ring.MODES."""
    if parallel.inner_mode != "auto":
        return parallel.inner_mode
    within = inner is not None or all(len(_runs(ring)) == 1 for ring in _rings(parallel, nodes))
    return "gather" if within else "ring"


def _rings(parallel, nodes: list[str]) -> list[list[str]]:
    return [nodes[first : first + parallel.cp] for first in range(0, len(nodes), parallel.cp)]


def _runs(ring: list[str]) -> list[tuple[str, int]]:
    """Neighbouring ranks of one node: its name and how many."""
    return [(node, len(list(ranks))) for node, ranks in itertools.groupby(ring)]


def _returns(runs: list[tuple[str, int]]) -> bool:
    """Whether a ring comes to one node twice."""
    return len({node for node, _ in runs}) < len(runs)


def _check_inner(inner: int, rings: list[list[str]]) -> None:
    for ring in rings:
        for first in range(0, len(ring), inner):
            if len(set(ring[first : first + inner])) > 1:
                raise UserError(
                    f"parallel.inner={inner} puts ranks of {', '.join(sorted(set(ring[first : first + inner])))} into"
                    " one inner circle; its ranks must stand on one node: choose a divisor of the ranks a node"
                )
