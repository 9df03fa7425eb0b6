"""A rank that hangs is named within the time-out, one that is slow at the next logged step, and so is a loss spike."""

import contextlib
import io
import json
import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from distributed import run_workers
from launched import command, run, workers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import write_recipe

from mtraining_nns import spikes
from mtraining_nns.data.guard import told
from mtraining_nns.data.mixture import Mixture
from mtraining_nns.engines.pulse import Pulse
from mtraining_nns.recipe import Recipe
from mtraining_nns.sections import LogConfig


def test_a_stopped_process_is_named(tmp_path):
    """As on a machine that is gone: nothing of the rank answers any more."""
    began = []

    def stop(process):
        os.kill(workers(process)[1], signal.SIGSTOP)
        began.append(time.monotonic())

    line = command(write_recipe(tmp_path, "train.steps=500", "parallel.timeout_s=6"))
    code, said = run(line, "step 30/", stop)  # beats come once a second and tell the place
    assert code == 1 and re.search(r"rank 1 on \S+ \(in step \d+, \w+\) has not answered for \d+ s", said), said
    assert time.monotonic() - began[0] < 6 + 6 + 35  # torch's agent gives the stopped process 30 s to end


def slow_reading(rank, world_size, path, seconds):
    """The error of rank 0 where rank 1 hangs before it computes, alive otherwise."""
    from mtraining_nns.engines import torch as engine

    batches = engine.Feed.batches

    def late(self, step):
        if rank == 1 and step == 1:
            time.sleep(seconds)
        return batches(self, step)

    engine.Feed.batches = late
    try:
        engine.train(Recipe.load(path).resolve(world_size))
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def test_a_rank_that_hangs_while_it_reads_is_named(tmp_path):
    """It ends itself, as it must where its peers hang in a driver."""
    path = write_recipe(tmp_path, "parallel.timeout_s=3")
    error = run_workers(slow_reading, 2, path, 8, may_die=[1])[0]
    assert re.search(r"rank 1 on \S+ \(in step 2, reading\) has hung for \d+ s, the others wait", error), error


def pulses(count: int, timeout_s: float):
    store, named = dist.HashStore(), []
    for rank in range(count):
        store.set(str(rank), "0|0|start")
    nodes = [f"node{rank}" for rank in range(count)]
    return [Pulse(store, rank, nodes, timeout_s, named.append) for rank in range(count)], named


def silence(pulse: Pulse) -> None:
    """Its beats reach nobody any more."""
    pulse.store = SimpleNamespace(set=lambda key, value: None, multi_get=pulse.store.multi_get)


def test_whoever_is_silent_or_behind_is_named_and_nobody_before():
    beating, named = pulses(3, timeout_s=0.9)
    for pulse in beating:
        pulse.at("step 1")
    time.sleep(1.5)
    assert not named, "a step may take longer than an exchange"
    for pulse in beating[:2]:
        pulse.at("step 2")
    time.sleep(1.5)
    assert len(named) == 3 and all("rank 2 on node2 (in step 1) has hung for 1 s" in text for text in named), named
    beating, named = pulses(3, timeout_s=0.9)
    beating[0].close()
    time.sleep(1.5)
    assert not named, "who has left is not silent"
    silence(beating[1])
    time.sleep(1.5)
    assert len(named) == 1 and "rank 1 on node1 (in start) has not answered for 1 s" in named[0], named


def test_an_error_is_given_the_name_before_the_time_out_is_over():
    beating, named = pulses(2, timeout_s=3)
    time.sleep(0.2)
    assert beating[0].blamed() == ""
    silence(beating[1])
    time.sleep(2.2)
    assert "rank 1 on node1 (in start) has not answered" in beating[0].blamed() and not named
    beating[0].close()


def with_a_spike_and_a_slow_rank(rank, world_size, path):
    """What rank 0 prints: the loss of step 7 is five times what it is, an MLP of rank 1 waits."""
    from mtraining_nns.engines import torch as engine

    train_step, watch = engine.train_step, engine.Pace.watch

    def spiked(*args, step, **more):
        result = train_step(*args, step=step, **more)
        return engine.StepResult(result.loss * (5 if step == 6 else 1), result.grad_norm)

    def watched(self, modules):
        watch(self, modules)
        if rank == 1:
            modules[0].gate_proj.register_forward_hook(lambda *_: time.sleep(0.2))

    engine.train_step, engine.Pace.watch = spiked, watched
    with contextlib.redirect_stdout(io.StringIO()) as text:
        engine.train(Recipe.load(path).resolve(world_size))
    return text.getvalue()


def test_a_spike_and_a_slow_rank_are_one_line_each_and_training_goes_on(tmp_path):
    path = write_recipe(tmp_path, "train.steps=8", "log.spike_warmup=4", "log.every=4", "log.batches=true")
    said, _ = run_workers(with_a_spike_and_a_slow_rank, 2, path)
    spike = [line for line in said.splitlines() if "loss spike" in line]
    data = Mixture.of(Recipe.load(path))
    batch = told(data, range(6, 7))
    assert len(spike) == 1 and spike[0].startswith("step 7: loss spike: loss ") and spike[0].endswith(batch), said
    slow = [line for line in said.splitlines() if " is slow: " in line]
    assert [line.split(":")[0] for line in slow] == ["step 4", "step 8"]
    assert all(re.search(r"rank 1 on \S+ is slow: 0\.\d+ s of own work, \d+\.\d+ times the median$", x) for x in slow)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss_spike")] == [7]
    assert all(event.value > 1.5 for event in events.Scalars("speed/slowest_rank_over_median"))
    read = [json.loads(line) for line in (tmp_path / "run" / "batches.jsonl").read_text().splitlines()]
    assert [entry["samples"] for entry in read] == [data.samples(range(step, step + 1)) for step in range(8)]
    assert len({entry["batch"] for entry in read}) == 8


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0] * 3, None),  # warm-up
        ([2.1, 2.0, 2.2, 2.1, 2.0, 2.1, 2.3, 2.1], (2.1, 2.6)),
        ([2.0] * 8, (2.0, 2.1)),  # no spread: half a percent
        ([9.0] * 8 + [2.0] * 8, (2.0, 2.1)),  # the window
        ([2.1, 2.0, 2.2, 2.1, 90.0, 2.1, 2.3, 2.1], (2.1, 2.6)),  # a spike does not hide the next
    ],
)
def test_limits_of_a_loss(losses, expected):
    found = spikes.limit(losses, LogConfig(spike_window=8, spike_warmup=4))
    assert found == (expected if expected is None else pytest.approx(expected))
    assert spikes.limit(losses, LogConfig(spike_window=0)) is None
