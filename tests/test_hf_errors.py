"""What the adapter would compute wrongly is an error: masks, packed rows, caches, windows, ruined rotary tables."""

import pytest
import torch
from hf_tiny import FAMILIES, FEW, build, config, operator, tokens
from transformers import LlamaForCausalLM, StaticCache

from mtraining_nns import hf
from mtraining_nns.rope import with_rope


def padded(model):
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :5] = 0
    model(tokens(60, 2), attention_mask=mask)


def padded_at_the_end(model):
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, -1:] = 0
    model(tokens(60, 2), attention_mask=mask)


def four_dimensional(model):
    model(tokens(60), attention_mask=torch.zeros(1, 1, 60, 60))


def block_diagonal(model):
    mask = torch.block_diag(torch.ones(30, 30), torch.ones(30, 30)).tril().bool()
    model(tokens(60), attention_mask=mask[None, None])


def packed(model):
    model(tokens(60), position_ids=torch.cat([torch.arange(30), torch.arange(30)])[None])


def packed_with_a_gap(model):
    model(tokens(60), position_ids=torch.cat([torch.arange(30), torch.arange(31, 61)])[None])


def packed_in_one_row(model):
    model(tokens(60, 2), position_ids=torch.stack([torch.arange(60), torch.arange(60) % 30]))


def chunked_prefill(model):
    cache = model(tokens(30), use_cache=True).past_key_values
    model(tokens(30, seed=1), past_key_values=cache)


def static_cache(model):
    model(tokens(30), past_key_values=StaticCache(config=model.config, max_cache_len=64))


def static_cache_and_one_token(model):
    model(tokens(1), past_key_values=StaticCache(config=model.config, max_cache_len=64))


def generation_with_a_static_cache(model):
    model.generate(tokens(1), max_new_tokens=4, do_sample=False, cache_implementation="static")


def left_padded_generation(model):
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :5] = 0
    model.generate(tokens(60, 2), attention_mask=mask, max_new_tokens=2, do_sample=False)


def attention_weights(model):
    model(tokens(60), output_attentions=True)


REFUSED = [
    (padded, "takes no padding, got an attention_mask with zeros"),
    (padded_at_the_end, "takes no padding"),
    (left_padded_generation, "takes no padding"),
    (four_dimensional, r"takes no attention mask, got one of shape \(1, 1, 60, 60\)|takes no padding"),
    (block_diagonal, "takes no attention mask, got one of shape|takes no padding"),
    (packed, "position_ids that do not rise by one"),
    (packed_with_a_gap, "position_ids that do not rise by one"),
    (packed_in_one_row, "position_ids that do not rise by one"),
    (chunked_prefill, "got 30 queries for 60 cached keys"),
    (static_cache, "64 cache"),
    (static_cache_and_one_token, "static cache"),
    (generation_with_a_static_cache, "static cache"),
    (attention_weights, "output_attentions"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_would_be_computed_wrongly_is_refused(call, message, family):
    with pytest.raises(ValueError, match=message):
        call(build(family, settings=FEW))


def test_dropout_is_refused_in_training_only():
    model = build(settings=FEW, attention_dropout=0.1)
    model(tokens(60))
    with pytest.raises(ValueError, match="dropout, got 0.1"):
        model.train()(tokens(60))


def test_dense_layers_that_the_model_has_not_are_refused():
    with pytest.raises(ValueError, match="dense_layers names layer 99, the model has layers 0 to"):
        hf.attach(build(settings=FEW), operator(**FEW, dense_layers=(99,)))


@pytest.mark.parametrize("attached", [True, False])
def test_sliding_windows_are_refused(attached):
    model = build("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding"):
        hf.attach(model, operator(**FEW)) if attached else model(tokens(60))


def test_only_models_that_were_loaded_for_it_are_attached():
    model = build(attention="eager")
    with pytest.raises(ValueError, match='attn_implementation="eager".*expected "mtraining"'):
        hf.attach(model, operator(**FEW))
    model.set_attn_implementation("mtraining")
    hf.attach(model, operator(**FEW))
    assert torch.equal(model(tokens(60)).logits, build(settings=FEW)(tokens(60)).logits)


def test_a_model_without_attention_is_refused():
    model = torch.nn.Linear(2, 2)
    model.config = config()
    model.config._attn_implementation = "mtraining"
    with pytest.raises(ValueError, match="Linear has no attention layer"):
        hf.check_model(model)


def test_the_sequence_length_ends_with_its_context():
    model = build(settings=FEW)
    with pytest.raises(KeyError), hf.sequence(model, seq_len=64):
        raise KeyError
    model(tokens(60))  # 60 is no longer taken for a shard of 64
    with hf.sequence(model, seq_len=64), pytest.raises(ValueError, match="holds 64 tokens of a sequence of 64"):
        model(tokens(60))


def test_a_sequence_needs_an_attached_operator():
    with pytest.raises(ValueError, match="attach"), hf.sequence(build(), seq_len=64):
        pass


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}


def test_rope_check_accepts_a_fresh_model():
    for fields in ({}, {"rope_parameters": YARN}):
        hf.rope_check(build(**fields))


def test_rope_check_catches_a_cast():
    with pytest.raises(ValueError, match="inv_freq is torch.bfloat16, expected torch.float32"):
        hf.rope_check(build().bfloat16())


def poison_tables(model, value):
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = torch.full_like(module.inv_freq, value)


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1.0])
def test_rope_check_catches_tables_that_were_never_filled(value):
    model = build()
    poison_tables(model, value)
    with pytest.raises(ValueError, match="inv_freq differs from the formula"):
        hf.rope_check(model)


def test_rope_check_catches_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    with pytest.raises(ValueError, match="inv_freq"):
        hf.rope_check(model)
    with pytest.raises(ValueError, match="inv_freq"):
        model = model.to_empty(device="cpu")
        poison_tables(model, 0.5)
        hf.rope_check(model)


def test_rope_check_catches_tables_of_another_config():
    model = build()
    model.model.rotary_emb.config = with_rope(config(), {"rope_theta": 1e6}, base_length=2048, trained_length=2048)
    with pytest.raises(ValueError, match="inv_freq differs"):
        hf.rope_check(model)
