"""Nodes and ring keys -> flat or hierarchical, without processes."""

from types import SimpleNamespace

import pytest

from mtraining_nns.errors import UserError
from mtraining_nns.topology import inner_mode, ring_shape


def shape(nodes: str, cp: int, ring: str = "auto", inner: int | None = None):
    return ring_shape(SimpleNamespace(cp=cp, ring=ring, inner=inner), list(nodes))


@pytest.mark.parametrize(
    ("nodes", "cp", "expected"),
    [
        ("aaaabbbb", 8, 4),
        ("aaaabbbb", 4, None),  # two rings, each on its node
        ("aabbccdd", 4, 2),  # two rings of two nodes
        ("aabbb", 5, None),
        ("abcd", 4, None),  # one rank a node: an outer circle alone is a flat ring
        ("aaaa", 4, None),
        ("abab", 4, None),
        ("aaabbb", 2, None),  # the second of three rings lies across two nodes, the others do not
        ("aaaa", 1, None),
    ],
)
def test_auto_is_hierarchical_on_equal_nodes(nodes, cp, expected):
    assert shape(nodes, cp).inner == expected


@pytest.mark.parametrize(
    ("nodes", "cp", "expected"),
    [
        ("aaaabbbb", 8, "gather"),
        ("aaaa", 4, "gather"),
        ("aaaabbbb", 4, "gather"),
        ("aabb", 2, "gather"),
        ("aabb", 4, "gather"),
        ("aabbb", 5, "ring"),  # a flat ring across nodes
        ("abcd", 4, "ring"),
    ],
)
def test_auto_gathers_within_nodes(nodes, cp, expected):
    parallel = SimpleNamespace(cp=cp, inner_mode="auto")
    assert inner_mode(parallel, shape(nodes, cp).inner, list(nodes)) == expected
    for asked in ("ring", "gather"):
        assert inner_mode(SimpleNamespace(cp=cp, inner_mode=asked), shape(nodes, cp).inner, list(nodes)) == asked


def test_uneven_nodes_are_named():
    assert shape("aabbb", 5).reason == "ranks by node are a 2, b 3"
    with pytest.raises(UserError, match="hierarchical needs .* ranks by node are a 2, b 3; .*parallel.ring=flat"):
        shape("aabbb", 5, "hierarchical")
    with pytest.raises(UserError, match="ranks by node are a 4"):
        shape("aaaa", 4, "hierarchical")


def test_what_is_asked_for():
    assert shape("aaaabbbb", 8, "flat") == (None, "asked for")
    assert shape("aaaabbbb", 8, "hierarchical").inner == 4
    assert shape("aaaabbbb", 8, "auto", inner=2) == (2, "parallel.inner=2")
    assert shape("aaaa", 4, "hierarchical", inner=2).inner == 2  # nodes within a node, to try things
    with pytest.raises(UserError, match="parallel.inner=3 puts ranks of a, b into one inner circle"):
        shape("aabbbb", 6, "hierarchical", inner=3)
