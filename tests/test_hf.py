"""HuggingFace models on the operator: equal to eager where all is kept, causal, sharded, and apart from each other."""

import copy

import pytest
import torch
from distributed import run_workers
from helpers import rms_ratio
from hf_tiny import ALL, FAMILIES, FEW, build, config, operator, tokens
from transformers import LlamaForCausalLM

from mtraining_nns import hf
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring


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
