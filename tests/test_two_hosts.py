"""Hierarchical against flat where the link between hosts is the limit: the same numbers, sooner."""

import statistics
import time

import pytest
import torch.distributed as dist
import two_hosts
from helpers import make_qkv, rms_ratio, with_grads

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

SEQ_LEN, HEADS, DIM = 2048, 8, 64  # 2 MB of keys and values a rank, and as much again in gradients
FEW = AttentionConfig(block=64, budget="fixed", k_v=64, k_s=2, local=64, sinks=16, last_q=16, cap=64)
RINGS = {"flat": {}, "hierarchical": {"inner": 2}, "gather": {"inner": 2, "mode": "gather"}}
STEPS = 2


def measure_rings(rank: int, world: int) -> dict:
    """Median seconds of a forward and a backward pass by ring, and how far the whole result is from the flat ring's."""
    results, seconds = {}, {}
    for name, levels in RINGS.items():
        op = Operator(FEW, Ring.create(world, **levels), "cpu")
        local = [op.layout(SEQ_LEN).shard(x, rank) for x in make_qkv(SEQ_LEN, HEADS, HEADS, DIM)]
        times = []
        for _ in range(STEPS + 1):
            dist.barrier()
            began = time.perf_counter()
            found = with_grads(lambda q, k, v, op=op: op(q, k, v, seq_len=SEQ_LEN), *local)
            times.append(time.perf_counter() - began)
        results[name] = {key: op.layout(SEQ_LEN).unshard(op.ring.gather(x)) for key, x in found.items()}
        seconds[name] = statistics.median(times[1:])
    differ = {name: max(rms_ratio(x, results["flat"][key]) for key, x in results[name].items()) for name in RINGS}
    return {"seconds": seconds, "differ": differ}


@pytest.mark.skipif(not two_hosts.permitted(), reason="this machine permits no network namespaces")
def test_hierarchical_beats_flat_over_a_slow_link():
    results = two_hosts.run("measure_rings", mbit=50)
    slowest = {name: max(result["seconds"][name] for result in results) for name in RINGS}
    print(slowest)
    assert all(result["differ"][name] < 1e-5 for result in results for name in RINGS), results
    assert slowest["flat"] / slowest["hierarchical"] > 1.2, slowest
    assert slowest["flat"] / slowest["gather"] > 1.2, slowest
