"""A peer that dies, stalls or holds another length: every other rank says where, within the time-out."""

import os
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from distributed import run_workers
from helpers import make_qkv, with_grads

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring, RingError

SEQ_LEN, TIMEOUT_S = 192, 2
PATTERNS = {"dense": {"pattern": "dense"}, "vertical_slash": {"p_v": 0.5, "p_s": 0.5}}


def run_layers(rank: int, world: int, how: str, pattern: str, **levels):
    """(error, seconds until it came) of a rank in the third layer, where rank 1 fails."""
    ring = Ring.create(world, timedelta(seconds=TIMEOUT_S), **levels)
    op = Operator(AttentionConfig(block=16, **PATTERNS[pattern]), ring, "cpu")

    def layer(number: int, seq_len: int) -> None:
        local = [op.layout(seq_len).shard(x, rank) for x in make_qkv(seq_len, 2, 1, 16)]
        with_grads(lambda q, k, v: op(q, k, v, layer=number, seq_len=seq_len), *local)

    for number in (0, 1):
        layer(number, SEQ_LEN)
    seq_len = SEQ_LEN
    if rank == 1 and how == "dies":
        os._exit(1)
    if rank == 1 and how == "stalls":
        time.sleep(4 * TIMEOUT_S)
        return None
    if rank == 1 and how == "length":
        seq_len = 2 * SEQ_LEN
    began = time.monotonic()
    try:
        layer(2, seq_len)
    except RingError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("no error")


@pytest.mark.parametrize("levels", [{}, {"inner": 2}, {"inner": 2, "mode": "gather"}], ids=["flat", "ring", "gather"])
@pytest.mark.parametrize(
    ("how", "pattern"),
    [("dies", "dense"), ("dies", "vertical_slash"), ("stalls", "dense"), ("length", "vertical_slash")],
)
def test_a_failing_peer_is_named(how, pattern, levels):
    work = partial(run_layers, **levels)
    results = run_workers(work, 4, how, pattern, may_die=(1,) if how == "dies" else ())
    others = [results[rank] for rank in (0, 2, 3)]
    assert all(seconds < 3 * TIMEOUT_S for _, seconds in others)
    assert all("layer 2" in message for message, _ in others), others
    assert all(f"rank {rank}" in message for rank, (message, _) in zip((0, 2, 3), others)), others
    assert any("rank 1" in message or "ranks (0, 1" in message for message, _ in others), others


def run_other_length(rank: int, world: int):
    ring = Ring.create(world, timedelta(seconds=TIMEOUT_S))
    op = Operator(AttentionConfig(block=16, pattern="dense"), ring, "cpu")
    seq_len = SEQ_LEN * (1 + rank // 2)
    with pytest.raises(RingError) as caught:
        op(*(op.layout(seq_len).shard(x, rank) for x in make_qkv(seq_len, 2, 1, 16)[:3]), layer=5, seq_len=seq_len)
    return str(caught.value)


def test_lengths_are_compared_before_anything_travels():
    first, *_, last = run_workers(run_other_length, 3)
    assert "layer 5" in first and "192, q (1, 64, 2, 16)" in first and "384, q (1, 128, 2, 16)" in first
    assert "on this rank 2" in last and "on rank 0" in last


def test_other_errors_of_an_estimate_are_no_failure_of_a_peer(monkeypatch):
    def build(*args):
        raise torch.OutOfMemoryError("out of memory")

    op = Operator(AttentionConfig(block=16), Ring.single(), "cpu")
    monkeypatch.setattr(op, "_pattern", lambda layer, layout: SimpleNamespace(build=build))
    with pytest.raises(torch.OutOfMemoryError, match="^out of memory"):
        op(*make_qkv(64, 2, 1, 16)[:3])
