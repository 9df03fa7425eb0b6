"""The benchmark of a training step, with tiny shapes on one CPU rank and on two."""

import contextlib
import io
import random

import pytest
import train_step as bench
from distributed import run_workers


def measured(rank, world_size, *words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        bench.main(["--model", "tiny", "--seq-len", "256", "--warmup", "0", *words])
    return out.getvalue()


@pytest.mark.parametrize("world, words", [(1, ["--no-recompute"]), (2, ["--zero", "3"])])
def test_a_row_a_density_beside_the_plan(world, words):
    printed = run_workers(measured, world, "--density", "1", "0.4", *words)
    assert not any(printed[1:]), "rank 0 speaks"
    *head, names, dense, sparse = printed[0].splitlines()
    assert "2 layers, 256 tokens" in head[0] and "A100, not of this CPU" in head[1]
    assert dense.split()[0] == "100.00%" and 20 < float(sparse.split()[0].rstrip("%")) < 90
    assert names.split()[:3] == ["kept", "step", "s"]
    for line in (dense, sparse):
        shares = [float(word.rstrip("%")) for word in line.split()[5:9]] + [float(line.split()[10].rstrip("%"))]
        assert all(0 <= share <= 100 for share in shares) and sum(shares) == pytest.approx(100, abs=0.5)
    assert float(sparse.split()[6].rstrip("%")) > float(dense.split()[6].rstrip("%")), "dense estimates nothing"


def test_time_of_transfers_alone():
    assert bench.alone([(0, 4), (3, 6)], [(1, 2), (5, 9)]) == 4
    assert bench.alone([], [(0, 1)]) == 0 == bench.alone([(0, 1)], [(0, 1)])
    r = random.Random(0)
    some, others = ([(s, s + r.randint(1, 9)) for s in r.sample(range(90), 12)] for _ in range(2))
    by_hand = sum(any(a <= t < b for a, b in some) and not any(a <= t < b for a, b in others) for t in range(120))
    assert bench.alone(some, others) == by_hand
