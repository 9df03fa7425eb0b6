"""After an out-of-memory error a run says what filled the GPU and which keys would help, with the plan's numbers."""

import json

import pytest
import torch
from distributed import run_workers
from test_plan import QWEN, write
from tiny import write_recipe

from mtraining_nns import environment, failure
from mtraining_nns.plan.advice import Gpu, changes, explain
from mtraining_nns.plan.memory import GIB, memory
from mtraining_nns.plan.planner import shape_of
from mtraining_nns.plan.setting import Setting
from mtraining_nns.recipe import Recipe


def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def run_out(rank, world_size, path, errors):
    """(exit code, what the worker left for the launcher)."""
    import os

    from mtraining_nns import train
    from mtraining_nns.engines import torch as engine

    engine.train_step = full
    os.environ[environment.ERROR_FILE] = f"{errors}.{rank}"
    code = train.main([path])
    with open(f"{errors}.{rank}") as stream:
        return code, json.load(stream)["message"]


def test_a_worker_that_finds_no_room_says_what_to_change(tmp_path):
    path = write_recipe(tmp_path, "parallel.cp=2")
    for code, message in run_workers(run_out, 2, path, str(tmp_path / "errors")):
        assert code == 1 and not message["extraInfo"]["user"]
        text = message["message"]
        assert "Tried to allocate 20.00 MiB" in text and "largest moment" in text
        assert "-" not in text.partition("largest moment")[2], "no part is negative"
        assert "train.recompute=true: " in text and "parallel.cp=4 on twice as many GPUs: " in text
        assert "out of memory" in message["extraInfo"]["py_callstack"]


def test_errors_under_those_of_an_engine_are_found():
    try:
        try:
            full()
        except torch.OutOfMemoryError as error:
            raise RuntimeError("trainer") from error
    except RuntimeError as error:
        assert failure.is_out_of_memory(error)
    assert not failure.is_out_of_memory(RuntimeError("out of memory"))


@pytest.mark.parametrize("keys", [[], ["train.recompute=false"], ["attention.keep_output=true", "parallel.zero=3"]])
def test_every_change_has_the_plans_number_and_helps(tmp_path, keys):
    recipe = Recipe.load(write(tmp_path, QWEN), [*keys, "parallel.dp=2"]).shared_by(8)
    shape = shape_of(recipe)
    text = explain(recipe, Gpu("cute", 8, 80 * GIB, 79 * GIB))
    assert "the GPU has 80.00 GiB; tensors held 79.00 GiB" in text

    def total(changed):
        world = changed.parallel.cp * changed.parallel.dp
        return memory(Setting(recipe=changed, shape=shape, world=world, node=8, backend="cute", density=1.0)).tensors

    before, told = total(recipe), text[text.index("what to change") :]
    for words, changed in changes(recipe):
        after = total(changed)
        assert (f"  {words}: {after / GIB:.2f} GiB" in told) == (after < 0.99 * before), words
    sizes = [float(line.partition(": ")[2].split()[0]) for line in told.splitlines()[1:]]
    assert sizes == sorted(sizes) and len(sizes) >= 3
