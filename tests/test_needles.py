"""Needles in training: the probability of an answer is that of the exported model, on any split of the ranks."""

import json

import pytest
import torch
from distributed import run_workers
from test_engine import run_engine
from tiny import save_tokenizer, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtraining_nns.errors import UserError
from mtraining_nns.needles import needles
from mtraining_nns.recipe import Recipe

EVERY = ["log.niah_every=3", "log.niah_depths=[0, 60]"]


def recipe_of(folder, *overrides) -> str:
    path = write_recipe(folder, *EVERY, *overrides)
    save_tokenizer(folder / "data")
    return path


def test_the_needle_lies_at_its_depth_and_the_answer_at_the_end(tmp_path):
    recipe = Recipe.load(recipe_of(tmp_path), []).resolve(1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer")
    first, later = needles(recipe)
    for needle in (first, later):
        assert needle.tokens.shape == (256,) and needle.answer == 7
        text = tokenizer.decode(needle.tokens).split()
        answer = text[-7:]
        assert text[-8] == "is" and all(digit.isdigit() for digit in answer)
        places = [i for i in range(256) if text[i : i + 7] == answer]
        assert len(places) == 2
        assert (places[0] < 80) == (needle is first)


@pytest.mark.parametrize(("world", "split"), [(1, []), (2, ["parallel.cp=2"]), (4, ["parallel.cp=2", "parallel.dp=2"])])
@pytest.mark.parametrize("pattern", ["dense", "vertical_slash"])
def test_scores_are_those_of_the_exported_model(tmp_path, world, split, pattern):
    path = recipe_of(tmp_path, f"attention.pattern={pattern}")
    found = run_workers(run_engine, world, path, split)[0]
    assert found == json.loads((tmp_path / "run" / "summary.json").read_text())
    if pattern == "dense":
        lm = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").eval()
        asked = needles(Recipe.load(path, []).resolve(1))
        losses = [answer_loss(lm, needle) for needle in asked]
        assert found["eval/niah"] == pytest.approx(sum(torch.exp(-torch.tensor(losses))).item() / 2, rel=1e-3)
        assert found["eval/niah_loss"] == pytest.approx(sum(losses) / 14, rel=1e-4)
    else:
        alone = run_workers(run_engine, 1, recipe_of(tmp_path / "alone", f"attention.pattern={pattern}"))[0]
        assert found["eval/niah_loss"] == pytest.approx(alone["eval/niah_loss"], rel=1e-3)


@torch.no_grad()
def answer_loss(lm, needle) -> float:
    logits = lm(needle.tokens[None]).logits[0, -needle.answer - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, needle.tokens[-needle.answer :], reduction="sum").item()


def test_what_cannot_be_is_said_before_the_first_step(tmp_path):
    with pytest.raises(UserError, match="log.niah_every needs room for a needle: niah length 32 cannot hold"):
        needles(Recipe.load(recipe_of(tmp_path), ["train.seq_len=32"]))
    with pytest.raises(UserError, match="log.niah_depths must be percentages, got"):
        Recipe.load(recipe_of(tmp_path / "depths"), ["log.niah_depths=[200]"])
    bare = Recipe.load(write_recipe(tmp_path / "bare", *EVERY), [])
    with pytest.raises(UserError, match="no tokenizer at"):
        needles(bare)
