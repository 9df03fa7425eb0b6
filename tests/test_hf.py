"""HuggingFace models on the operator: equal to eager where all is kept, refusals everywhere else."""

import copy

import pytest
import torch
from distributed import run_workers
from helpers import rms_ratio
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache

from mtraining_nns import hf
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
ALL = {"block": 16, "p_v": 1.0, "p_s": 1.0}
FEW = {"block": 16, "budget": "fixed", "k_v": 4, "k_s": 1, "sinks": 2, "local": 16, "last_q": 8}


def operator(**settings) -> Operator:
    return Operator(AttentionConfig(**settings), Ring.single(), "cpu")


def config(family="llama", **fields):
    return FAMILIES[family][0](**{**SIZES, **fields})


def build(family="llama", attention="mtraining", settings=None, **fields):
    """A tiny model; the weights depend on the family alone."""
    hf.register()
    torch.manual_seed(0)
    cfg = config(family, **fields)
    cfg._attn_implementation = attention
    model = FAMILIES[family][1](cfg).eval()
    if settings is not None:
        hf.attach(model, operator(**settings))
    return model


def tokens(length, batch=1, seed=0):
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_and_grads(model, ids):
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("settings", [ALL, {"block": 16, "pattern": "dense"}], ids=["keep all", "dense"])
@pytest.mark.parametrize("length", [1, 65, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_keep_all_is_eager(family, length, settings):
    eager, ours = build(family, "eager"), build(family, settings=settings)
    ids = tokens(length, batch=2)
    if length == 1:
        assert rms_ratio(ours(ids).logits, eager(ids).logits) < 1e-5
        return
    (logits, grads), (expected, expected_grads) = loss_and_grads(ours, ids), loss_and_grads(eager, ids)
    assert rms_ratio(logits, expected) < 1e-5
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        if "k_proj.bias" in name:  # softmax cancels a shift of all keys but for the rotation
            continue
        assert rms_ratio(grad, expected_grads[name]) < 2e-5, name


def test_keep_few_is_not_eager():
    ids = tokens(200)
    assert rms_ratio(build(settings=FEW)(ids).logits, build(attention="eager")(ids).logits) > 1e-2


@pytest.mark.parametrize("settings", [ALL, {"block": 16, "pattern": "dense"}], ids=["keep all", "dense"])
def test_a_later_token_changes_no_bit_before_it(settings):
    model = build("qwen2", settings=settings)
    ids = tokens(1000)
    changed = ids.clone()
    changed[0, 500] = (ids[0, 500] + 1) % 97
    with torch.no_grad():
        before, after = model(ids).logits[0], model(changed).logits[0]
    assert torch.equal(before[:500], after[:500])
    assert (before[500:] != after[500:]).any(-1).all()


def test_no_query_attends_to_a_later_token():
    """Of a sparse pattern, whose index does depend on later tokens: gradients of early logits end where they stand."""
    model = build(settings=FEW)
    x = model.get_input_embeddings()(tokens(300)).detach().requires_grad_()
    model(inputs_embeds=x).logits[:, :150].square().sum().backward()
    assert not x.grad[:, 150:].any()
    assert x.grad[:, :150].abs().sum(-1).min() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_eager(family):
    ids = tokens(50, batch=2)
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = build(family, "eager").generate(ids, **settings)
    for attention_mask in (None, torch.ones_like(ids)):
        got = build(family, settings=ALL).generate(ids, attention_mask=attention_mask, **settings)
        assert torch.equal(got, expected)


def test_a_prompt_of_one_token_generates_as_eager():
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = build(attention="eager").generate(tokens(1), **settings)
    assert torch.equal(build(settings=FEW).generate(tokens(1), **settings), expected)


def test_decoding_attends_to_the_whole_cache():
    """Every new token is dense, so teacher-forced steps after a kept-all prompt equal one eager forward."""
    model, ids = build("qwen2", settings=ALL), tokens(40)
    with torch.no_grad():
        out = model(ids[:, :30], use_cache=True)
        steps = []
        for i in range(30, 40):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits)
        expected = build("qwen2", "eager")(ids).logits[:, 30:]
    assert rms_ratio(torch.cat(steps, 1), expected) < 1e-5


def test_a_mask_without_zeros_hides_nothing():
    model, ids = build(settings=FEW), tokens(60)
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


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
    (static_cache, "got 30 queries for 64 cached keys"),
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


def test_attach_and_detach():
    ids = tokens(300)
    model = build()
    default = model(ids).logits  # the default keeps everything nearer than 1024
    assert rms_ratio(default, build(attention="eager")(ids).logits) < 1e-5
    hf.attach(model, operator(**FEW))
    few = model(ids).logits
    assert rms_ratio(few, default) > 1e-2
    hf.attach(model, operator(**ALL))
    assert rms_ratio(model(ids).logits, default) < 1e-5
    hf.attach(model, operator(**FEW))
    assert torch.equal(model(ids).logits, few)
    hf.detach(model)
    assert torch.equal(model(ids).logits, default)
    hf.detach(model)


def test_two_models_of_one_config_object_stay_apart():
    hf.register()
    cfg = config()
    cfg._attn_implementation = "mtraining"
    before = copy.deepcopy(cfg.to_dict())
    torch.manual_seed(0)
    first = LlamaForCausalLM(cfg).eval()
    torch.manual_seed(0)
    second = LlamaForCausalLM(cfg).eval()
    ids = tokens(200)
    expected = second(ids).logits
    hf.attach(first, operator(**FEW))
    few = first(ids).logits
    assert cfg.to_dict() == before
    assert torch.equal(second(ids).logits, expected) and not torch.equal(few, expected)
    hf.attach(second, operator(block=16, pattern="dense"))
    assert torch.equal(first(ids).logits, few)
    hf.detach(second)
    assert torch.equal(first(ids).logits, few)


def test_registering_twice_is_harmless():
    hf.register()
    model = build(settings=FEW)
    expected = model(tokens(60)).logits
    hf.register()
    assert torch.equal(model(tokens(60)).logits, expected)


def test_dense_layers_are_counted_from_the_first():
    ids = tokens(200)
    model = build(settings={**FEW, "dense_layers": (0,)})
    model(ids)
    density = model.model.layers[0].self_attn._mtraining.operator.read_stats()["density"]
    assert density[0] == 1.0 and density[1] < 0.6


def test_gradient_checkpointing_changes_no_bit():
    ids = tokens(200)
    model = build(settings=FEW).train()
    logits, expected = loss_and_grads(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, grads = loss_and_grads(model, ids)
    assert torch.equal(again, logits)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def run_sharded(rank: int, world: int, layout_kind: str) -> dict:
    """Logits and gradients of this rank's shard, positions given, as training does it."""
    op = Operator(AttentionConfig(**FEW, layout=layout_kind), Ring.create(world), "cpu")
    model = build("qwen2")
    hf.attach(model, op)
    ids = tokens(201)
    layout = op.layout(201)
    positions = layout.positions(rank).clamp_max(200)[None]
    with hf.sequence(model, seq_len=201):
        logits = model(layout.shard(ids, rank), position_ids=positions, use_cache=False).logits
    weight = layout.shard(torch.randn(1, 201, 97, generator=torch.Generator().manual_seed(1)), rank)
    (logits * weight).sum().backward()
    return {"logits": logits.detach(), "grads": [p.grad for p in model.parameters()]}


@pytest.mark.parametrize("kind", ["striped", "zigzag", "contiguous"])
def test_a_sharded_model_is_the_whole_model(kind):
    parts = run_workers(run_sharded, 3, kind)
    model = build("qwen2", settings=FEW)
    logits = model(tokens(201), use_cache=False).logits
    (logits * torch.randn(1, 201, 97, generator=torch.Generator().manual_seed(1))).sum().backward()
    layout = Operator(AttentionConfig(**FEW, layout=kind), Ring(ranks=(0, 1, 2)), "cpu").layout(201)
    assert rms_ratio(layout.unshard([part["logits"] for part in parts]), logits) < 1e-5
    for i, (name, p) in enumerate(model.named_parameters()):
        if "k_proj.bias" not in name:
            assert rms_ratio(sum(part["grads"][i] for part in parts), p.grad) < 2e-5, name


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
    model.model.rotary_emb.config = config(rope_parameters=YARN)
    with pytest.raises(ValueError, match="inv_freq differs"):
        hf.rope_check(model)
