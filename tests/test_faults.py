"""A step that is not finite ends before its update on all ranks, and names samples, batch and the place it began."""

import re

import launched
import pytest
import torch
from distributed import run_workers
from tiny import write_recipe

from mtraining_nns.data.guard import batch_fingerprint
from mtraining_nns.data.mixture import Mixture
from mtraining_nns.recipe import Recipe

SPLITS = {"ring": ["parallel.cp=2"], "two rings": ["parallel.cp=1", "parallel.dp=2", "train.accumulation=1"]}


def poison(model, rank: int, how: str) -> None:
    """Break something on rank 1 only."""
    layers = model.lm.model.layers
    if how == "weight" and rank == 1:
        layers[1].mlp.up_proj.weight.data.to_local()[3, 5] = float("nan")
    if how == "output" and rank == 1:
        layers[1].self_attn.register_forward_hook(lambda module, args, out: (out[0] * float("inf"), *out[1:]))
    if how == "gradient" and rank == 1:

        def spoil(module, args, out):
            if out.requires_grad:
                out.register_hook(lambda grad: grad * float("nan"))

        layers[0].mlp.register_forward_hook(spoil)
    if how == "once" and rank == 1:
        state = {"left": 1}

        def flip(module, args, out):
            state["left"] -= 1
            return out * float("nan") if state["left"] == 0 else out

        layers[0].mlp.register_forward_hook(flip)


def fault(rank, world_size, path, split, how):
    """(error, whether the weights are those before the step) of a run that breaks in step 1."""
    from mtraining_nns.engines import torch as engine

    train_step, kept = engine.train_step, []

    def broken(model, optimizer, *args, step, **more):
        if step == 1:
            poison(model, rank, how)
            kept.extend((p, p.detach().to_local().clone()) for p in model.parameters())
        return train_step(model, optimizer, *args, step=step, **more)

    engine.train_step = broken
    try:
        engine.train(Recipe.load(path, split).resolve(world_size))
    except engine.NotFinite as error:
        return str(error), all(torch.equal(p.detach().to_local().nan_to_num(), x.nan_to_num()) for p, x in kept)
    raise AssertionError("no error")


EXPECTED = {
    "weight": "first not finite: weight model.layers.1.mlp.up_proj.weight, and 0 of 20 others",
    "output": "first not finite: output of model.layers.1.self_attn on ranks 1, micro-batch 1 of ",
    "gradient": "first not finite: gradient of model.layers.0.post_attention_layernorm.weight, nearest to the loss of ",
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("how", EXPECTED)
def test_the_first_place_is_named_on_all_ranks_before_the_update(tmp_path, how, split):
    path = write_recipe(tmp_path, "train.accumulation=2", "train.recompute=true")
    found = run_workers(fault, 2, path, SPLITS[split], how)
    (error, untouched), other = found
    assert (error, untouched) == other and untouched, found
    assert re.match(r"step 1: loss \S+, gradient norm nan, samples \[\d+, \d+\] of ", error), error
    assert EXPECTED[how] in error


def test_what_does_not_repeat_is_said(tmp_path):
    """A bit that flips once: the second forward pass is finite, the gradients are not."""
    (error, _), _ = run_workers(fault, 2, write_recipe(tmp_path), ["parallel.cp=2"], "once")
    assert "loss nan" in error and "gradient of " in error and error.endswith("forward pass, run again, is finite"), (
        error
    )


def test_the_hash_is_that_of_the_tokens_of_the_step(tmp_path):
    path = write_recipe(tmp_path, "train.lr=1e30", "train.accumulation=2")
    (error, _), _ = run_workers(fault, 2, path, [], "nothing")
    data = Mixture.of(Recipe.load(path))
    tokens = torch.stack([data[visit][0] for visit in (2, 3)])
    assert f"batch {batch_fingerprint(tokens) % 2**64:016x}; first not finite: " in error, error


def test_the_launcher_says_it_at_once(tmp_path):
    """Through the whole command: the error is told and the run ends."""
    path = write_recipe(tmp_path, "train.lr=1e30", "train.warmup_steps=0", "train.clip=1e30")
    code, said = launched.run(launched.command(path), timeout_s=60)
    assert code == 1 and re.search(r"NotFinite: step 1: loss nan, .*; first not finite: ", said), said
    assert said.count("Traceback") <= 2, "the error, and the one that it came of"
