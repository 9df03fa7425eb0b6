"""Speeds and shares of a run against what its tokens and pairs are worth by hand."""

import time

import pytest
import torch
from distributed import run_workers
from tiny import MODEL, write_recipe

from mtraining_nns.metrics import WARMUP_STEPS, Meter
from mtraining_nns.ops import clock
from mtraining_nns.plan.constants import of_device
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe
from mtraining_nns.speed import Speed

CPU = torch.device("cpu")


def trained(rank, world_size, path):
    from mtraining_nns.engines import torch as engine

    return engine.train(Recipe.load(path).resolve(world_size))


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed")
    keys = ["log.profile_every=4", "log.every=4", "parallel.cp=2", "train.recompute=true", "train.accumulation=2"]
    return run_workers(trained, 2, write_recipe(folder, *keys, tokens=4096))


def test_a_run_tells_what_its_speed_is_worth(summaries):
    found = summaries[0]
    speed = found["speed/tokens_per_s"]
    assert found["speed/tokens_per_s_per_gpu"] == pytest.approx(speed / 2)
    # two layers of q, k, v, o (128 x 128 and 128 x 64) and three 128 x 128, and the head: twice each weight a token,
    # three times with the backward pass
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 128
    linear = 6 * (2 * layer + 128 * MODEL["vocab_size"])
    pairs = 2 * 2 * 256 * 257 / 2  # layers, heads, causal pairs
    for name, kept in (("dense_equivalent", 1.0), ("kept", found["attention/density"])):
        by_hand = linear + 3 * 4 * 64 * pairs * kept / 256
        assert found[f"speed/tflops_{name}"] == pytest.approx(speed / 2 * by_hand / 1e12, rel=1e-6)
    assert found["attention/kept_pairs"] == pytest.approx(pairs * found["attention/density"])
    assert not any("mfu" in tag for tag in found), "nobody knows the peak of this CPU"


def test_shares_are_measured_and_add_up(summaries):
    for found in summaries:
        shares = [found[f"time/{name}_share"] for name in ("attention", "index", "loss", "optimizer")]
        assert all(0 < share < 1 for share in shares) and sum(shares) < 1
        assert 0 < found["time/exposed_share"] < 1  # a ring of two waits for its keys
        assert found["time/step_s"] > 0


def test_a_run_that_is_not_asked_measures_no_shares(tmp_path):
    found = run_workers(trained, 1, write_recipe(tmp_path, "train.steps=2"))[0]
    assert not any(tag.startswith("time/") for tag in found)
    assert "speed/tokens_per_s" not in found, "two steps are warm-up"


def test_warm_up_is_no_speed():
    meter = Meter(1000)
    for seconds in (0.2,) * WARMUP_STEPS + (0.02, 0.02):
        with meter:
            time.sleep(seconds)
    assert 1000 / 0.06 < meter.tokens_per_s() <= 1000 / 0.02


def test_mfu_needs_the_peak_of_the_gpu():
    assert of_device("NVIDIA H200")["peak_tflops"] == 989 and of_device("Some GPU") is None
    assert of_device("NVIDIA A100-SXM4-40GB")["memory_gib"] < of_device("NVIDIA A100-SXM4-80GB")["memory_gib"]
    shape = Shape(
        layers=1, hidden=10, intermediate=10, heads=1, kv_heads=1, head_dim=8, vocabulary=50, tied=True, linear=500,
        layer_weights=((50, 10),), root_weights=((50, 10),),
    )  # fmt: skip
    speed = Speed(shape, seq_len=100, sequences=2, world=4, peak_tflops=1e-3)
    values = speed.values(1e6, kept_pairs=2 * 505)
    # 6 operations a token and weight (500 + 500), 12 x 8 a pair of 50.5 pairs a token, or of 5.05
    assert values["speed/mfu_dense_equivalent"] == pytest.approx(1e6 / 4 * (6000 + 96 * 50.5) / 1e9)
    assert values["speed/mfu_kept"] == pytest.approx(1e6 / 4 * (6000 + 96 * 5.05) / 1e9)
    assert speed.values(None, kept_pairs=1) == {}


def test_the_clock_measures_nothing_while_it_does_not_run():
    with clock.span("before"):
        pass
    with clock.running(CPU) as found:
        for _ in range(2):
            with clock.span("sleep"):
                time.sleep(0.01)
    with clock.span("after"):
        pass
    seconds = found.seconds()
    assert set(seconds) == {"sleep", "step"}
    assert 0.02 <= seconds["sleep"] <= seconds["step"] < 0.2
    with pytest.raises(AssertionError, match="runs already"), clock.running(CPU), clock.running(CPU):
        pass
    with clock.running(CPU):
        pass  # an error has stopped the one before
