"""The model of a recipe: rope of a longer context, strict loading, nothing shared between two models."""

import copy
import math

import pytest
import torch
from distributed import run_workers
from safetensors.torch import load_file, save_file
from tiny import MODEL, write_recipe
from transformers import AutoModelForCausalLM

from mtraining_nns.errors import UserError
from mtraining_nns.loss import IGNORE
from mtraining_nns.model import CausalLMLoss, build_config, build_model, materialize, recompute_layers
from mtraining_nns.recipe import Recipe
from mtraining_nns.rope import rope_of, with_rope

MANIFEST = {"vocab_size": 128, "eos_id": 0}
DIM = MODEL["head_dim"]


def config_of(tmp_path, rope=None, **model):
    recipe = Recipe.load(write_recipe(tmp_path, *(f"model.{key}={value}" for key, value in model.items())))
    object.__setattr__(recipe.model, "rope", rope)
    return build_config(recipe, MANIFEST)


def plain(theta):
    return theta ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)


def yarn(theta, factor, original):
    """YaRN, section 3.2: dimensions that turn more than 32 times keep their frequency, below once are interpolated."""

    def dimension(turns):
        return DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), DIM - 1)
    kept = 1 - ((torch.arange(DIM // 2) - low) / (high - low)).clamp(0, 1)
    return plain(theta) / factor * (1 - kept) + plain(theta) * kept


def llama3(theta, factor, original, low, high):
    """Llama 3.1: wavelengths above original / low are divided by factor, below original / high kept."""
    frequencies = plain(theta)
    blend = ((original * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": ({"rope_theta": 2.5e7}, plain(2.5e7), 1.0),
    "linear": ({"rope_type": "linear", "factor": 4.0}, plain(1e4) / 4, 1.0),
    "yarn": ({"rope_type": "yarn", "rope_theta": 1e6}, yarn(1e6, 4.0, 256), 0.1 * math.log(4) + 1),
    "llama3": ({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, llama3(5e5, 8.0, 64, 1.0, 4.0), 1.0),
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("poisoned", [False, True])
def test_rope_of_a_recipe_equals_its_formula(tmp_path, kind, poisoned):
    rope, expected, scaling = ROPES[kind]
    base = build_model(config_of(tmp_path), seed=0).model.rotary_emb.inv_freq
    config = config_of(tmp_path, rope, max_position_embeddings=1024)
    lm = build_model(config, seed=None if poisoned else 0)
    if poisoned:
        empty = torch.empty_like
        torch.empty_like = lambda x, **options: empty(x, **options).fill_(math.nan)
        try:
            materialize(lm, "cpu")
        finally:
            torch.empty_like = empty
        assert lm.model.norm.weight.isnan().all()
    table = lm.model.rotary_emb
    assert table.inv_freq.dtype == torch.float32 and table.inv_freq[0] == expected[0].float()
    assert torch.allclose(table.inv_freq.double(), expected, rtol=1e-5, atol=0)
    assert not torch.equal(table.inv_freq, base)
    assert table.attention_scaling == pytest.approx(scaling)
    assert lm.config.max_position_embeddings == 1024


def test_far_positions_differ_in_bf16(tmp_path):
    table = build_model(config_of(tmp_path, {"rope_theta": 2.5e7}), seed=0).model.rotary_emb
    cos, _ = table(torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.tensor([[262144, 262145]]))
    assert cos.dtype == torch.bfloat16 and not torch.equal(cos[0, 0], cos[0, 1])


def test_two_models_of_one_config_share_nothing(tmp_path):
    config = config_of(tmp_path, {"rope_type": "yarn", "rope_theta": 1e6}, max_position_embeddings=1024)
    before = copy.deepcopy(config.to_dict())
    first, second = build_model(config, seed=0), build_model(config, seed=0)
    first.config.max_position_embeddings = 1
    (getattr(first.config, "rope_parameters", None) or first.config.rope_scaling)["factor"] = 3.0
    first.model.layers[0].self_attn.config.num_hidden_layers = 7
    assert second.config.max_position_embeddings == 1024 and rope_of(second.config)["factor"] == 4.0
    assert second.model.config.num_hidden_layers == 2 and config.to_dict() == before
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_a_config_of_transformers_5_means_the_same_to_version_4(tmp_path):
    config = config_of(tmp_path)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 3e6, "factor": 2.0}  # all that version 5 writes
    config = with_rope(config, None, base_length=256, trained_length=256)
    expected = (plain(3e6) / 2).float()
    assert torch.allclose(build_model(config, seed=0).model.rotary_emb.inv_freq, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_type": "yearn"}, "must be one of default, linear, yarn, llama3, got 'yearn'"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"factor": 4.0}, "model.rope.factor is no parameter of type default"),
        ({"rope_theta": "2.5e7"}, "must be a positive number, got '2.5e7'"),
        ({"rope_type": "yarn", "factor": 2.0}, "set model.max_position_embeddings=512"),
    ],
)
def test_rope_mistakes_are_named(tmp_path, rope, message):
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, rope, max_position_embeddings=1024)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"init": "{model_type: llama, hiden_size: 64}"}, "model.init.hiden_size is no .*did you mean hidden_size"),
        ({"init": "{model_type: llama, hidden_size: abc}"}, "model.init.hidden_size must be int, got 'abc'"),
        ({"init": "{model_type: llama, head_dim: 0}"}, "model.init.head_dim must be at least 1, got 0"),
        ({"init": "{model_type: llama, num_key_value_heads: 0}"}, "num_key_value_heads must be at least 1, got 0"),
        ({"init": "{model_type: lama}"}, "transformers knows no model.init.model_type='lama'"),
        ({"init": "{model_type: llama, vocab_size: 100}"}, "the model knows 100 tokens"),
        ({"max_position_embeddings": 100}, "max_position_embeddings=100 is below train.seq_len=256"),
        ({"init": "null", "path": "org/model"}, "hf download org/model"),
    ],
)
def test_model_mistakes_are_named(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, **change)


def saved_model(folder, tied=True):
    config = copy.deepcopy(build_config(Recipe.load(write_recipe(folder)), MANIFEST))
    config.tie_word_embeddings = tied
    lm = build_model(config, seed=5)
    lm.to(torch.bfloat16).save_pretrained(folder / "model", max_shard_size="200KB")
    return folder / "model"


def load_sharded(rank, world_size, path, folder):
    """Full tensors of a pretrained folder that was read straight into FSDP shards."""
    from mtraining_nns.engines.torch import build_sharded
    from mtraining_nns.engines.world import start

    recipe = Recipe.load(path, ["model.init=null", f"model.path={folder}"]).resolve(world_size)
    with start(recipe.parallel) as world:
        model, _ = build_sharded(recipe, world, load=True)
        return {name: p.detach().full_tensor() for name, p in model.lm.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_pretrained_weights_reach_their_shards_in_fp32(tmp_path, tied):
    folder = saved_model(tmp_path, tied)
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    found = run_workers(load_sharded, 3, str(tmp_path / "recipe.yaml"), str(folder))[2]
    assert found.keys() == expected.keys() and ("lm_head.weight" in found) != tied
    assert all(x.dtype == torch.float32 and torch.equal(x, expected[name].float()) for name, x in found.items())


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "has no tensor model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "holds extra, which LlamaForCausalLM does not know"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64)}), r"has shape \[64\], expected \[128\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, damage, message):
    folder = saved_model(tmp_path)
    file = next(file for file in folder.glob("*.safetensors") if "model.norm.weight" in load_file(file))
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    recipe = Recipe.load(str(tmp_path / "recipe.yaml"), ["model.init=null", f"model.path={folder}"])
    with pytest.raises(UserError, match=message):
        materialize(build_model(build_config(recipe, MANIFEST), seed=None), "cpu", str(folder))


def test_the_wrapper_equals_the_models_own_loss_and_recompute_changes_nothing(tmp_path):
    lm = build_model(config_of(tmp_path), seed=0).train()
    ids = torch.randint(1, 128, (2, 64))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), IGNORE)], dim=1)
    positions = torch.arange(64).expand(2, -1)
    loss = CausalLMLoss(lm, chunk=10)(ids, labels, positions)
    expected = lm(input_ids=ids, labels=ids).loss * 126
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    plain_grads = torch.autograd.grad(loss, list(lm.parameters()))
    recompute_layers(lm)
    again = torch.autograd.grad(CausalLMLoss(lm, chunk=10)(ids, labels, positions), list(lm.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain_grads, again))


def test_what_sparse_attention_does_not_do_is_refused_before_a_model_is_built(tmp_path):
    with pytest.raises(UserError, match="attention_dropout=0.1, expected 0: .* set it in model.init"):
        config_of(tmp_path, **{"init.attention_dropout": 0.1})
