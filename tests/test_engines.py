"""Which engine runs a recipe, what it refuses before anything starts, and what the code of nnScaler is named by."""

from dataclasses import replace

import pytest
from tiny import write_recipe
from tiny_model import save_llama

from mtraining_nns import engines
from mtraining_nns.errors import UserError
from mtraining_nns.nnscaler_args import identity
from mtraining_nns.parallelize import Request
from mtraining_nns.recipe import Recipe


@pytest.mark.parametrize(("engine", "other"), [("torch", "nnscaler/states/0000-0004/complete.json"),
                                               ("nnscaler", "step-000004/manifest.json")])  # fmt: skip
def test_an_engine_does_not_start_over_in_the_others_folder(tmp_path, monkeypatch, engine, other):
    monkeypatch.setattr(engines, "nnscaler_fault", lambda: "")
    recipe = Recipe.load(write_recipe(tmp_path), [f"parallel.engine={engine}"])
    engines.check(recipe)
    file = tmp_path / "run" / other
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(
        UserError, match=f"holds {file.parent.name} of the .* engine, which parallel.engine={engine} does"
    ):
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
