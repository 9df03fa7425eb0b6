"""Which engine runs a recipe, what it refuses before anything starts, and what the code of nnScaler is named by."""

import re
from dataclasses import replace

import pytest
from tiny import write_recipe
from tiny_model import save_llama

from mtraining_nns import cli, engines
from mtraining_nns.errors import UserError
from mtraining_nns.nnscaler_args import identity
from mtraining_nns.parallelize import Request
from mtraining_nns.recipe import Recipe


def test_auto_goes_on_with_the_engine_of_the_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "nnscaler_fault", lambda: "")
    recipe = Recipe.load(write_recipe(tmp_path), ["parallel.engine=auto"])
    assert engines.choose(recipe) == ("nnscaler", "nnScaler is importable")
    for place in ("step-000004/manifest.json", "nnscaler/states/0000-0008/complete.json", "step-000012/manifest.json"):
        (tmp_path / "run" / place).parent.mkdir(parents=True)
        (tmp_path / "run" / place).write_text('{"files": {}}')
        assert engines.choose(recipe)[0] == ("nnscaler" if "nnscaler" in place else "torch")
        engines.check(recipe)
    alone = ["parallel.engine=auto", "train.kernels=liger"]
    told = engines.choose(Recipe.load(write_recipe(tmp_path, "train.recompute=true"), alone))
    assert told == ("torch", "train.kernels=liger is for parallel.engine=torch")
    told = engines.choose(Recipe.load(write_recipe(tmp_path), ["parallel.engine=auto", "parallel.zero=1"]))
    assert told == ("nnscaler", "parallel.zero=1 is for parallel.engine=nnscaler (torch has 2 and 3)")
    with pytest.raises(UserError, match="holds step-000012 of another run"):
        engines.check(replace(recipe, checkpoint=replace(recipe.checkpoint, resume="never")))


def test_checkpoints_of_nnscaler_are_no_start_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "nnscaler_fault", lambda: "nnScaler is not importable")
    recipe = Recipe.load(write_recipe(tmp_path), [])
    engines.check(recipe)
    file = tmp_path / "run" / "nnscaler" / "states" / "0000-0008" / "complete.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"files": {}}')
    with pytest.raises(UserError, match="0000-0008 is a checkpoint of nnScaler, which reads it: nnScaler is not imp"):
        engines.check(recipe)


def test_what_one_engine_alone_can_do_is_refused_by_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "nnscaler_fault", lambda: "")
    path = write_recipe(tmp_path, "train.recompute=true")
    for overrides, message in (
        (["parallel.engine=nnscaler", "train.offload_inputs=true"], "offload_inputs=true is for parallel.engine=torch"),
        (["parallel.engine=nnscaler", "train.kernels=liger"], "kernels=liger is for parallel.engine=torch"),
        (["parallel.engine=torch", "parallel.zero=1"], "parallel.zero=1 is for parallel.engine=nnscaler"),
    ):
        with pytest.raises(UserError, match=message):
            engines.check(Recipe.load(path, overrides))


def test_the_name_of_generated_code_follows_the_initial_weights(tmp_path):
    """A seed counts for a fresh model alone, and weights of the same size and config are told apart."""
    fresh = Recipe.load(write_recipe(tmp_path), [])
    seeded = replace(fresh, train=replace(fresh.train, seed=7))
    assert identity(fresh) != identity(seeded)
    folder = save_llama(tmp_path / "base")

    def based(recipe):
        return identity(replace(recipe, model=replace(recipe.model, init=None, path=str(folder))))

    before = based(fresh)
    assert based(seeded) == before
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert based(fresh) != before


def test_a_plan_gives_each_gpu_tokens():
    with pytest.raises(
        UserError, match="--world 16 gives each GPU a stripe of 128 tokens, so --seq-len must be at least"
    ):
        Request(model="a:B", world=16, seq_len=300, out="plan")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.kernels=liger"], "kernels=liger is for parallel.engine=torch"),
        (["checkpoint.resume=tests"], "checkpoint.resume=tests is for mtraining train"),
        (["--out", "."], "is a folder, expected a file to write; give another --out"),
    ],
)
def test_what_stock_nnscaler_train_would_not_do_is_refused(tmp_path, capsys, words, message):
    path = write_recipe(tmp_path, "train.recompute=true")
    out = [] if "--out" in words else ["--out", str(tmp_path / "run.yaml")]
    assert cli.main(["resolve", path, "--nproc", "2", *words, *out]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run.yaml").exists()
