"""The index of a forward pass is the index of its backward pass, with and without activation checkpointing."""

import pytest
import torch
from helpers import make_index, make_qkv, operator_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from mtraining_nns.ops import passes as ops_passes
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring
from mtraining_nns.ops.store import MOST_PENDING, IndexStore

SETTINGS = {"block": 16, "budget": "fixed", "k_v": 6, "k_s": 1, "sinks": 0, "local": 0, "last_q": 8}


class FreshIndexEachTime:
    """A pattern whose every estimate differs, so that a second estimate is seen in the gradients."""

    def __init__(self):
        self.built = []

    def build(self, q, k, place, config, scale):
        index = make_index(q.shape[1], q.shape[2], 16, batch=q.shape[0], share=0.3, seed=len(self.built))
        self.built.append(index)
        return index


def fresh_operator(**settings):
    op = Operator(AttentionConfig(**SETTINGS, **settings), Ring.single(), "cpu")
    pattern = FreshIndexEachTime()
    op._pattern = lambda layer, layout: pattern
    return op, pattern


class Layers(nn.Module):
    """A stack of projections around the operator, as a transformer has them; each layer may be checkpointed."""

    def __init__(self, op, layers=3, **checkpointing):
        super().__init__()
        torch.manual_seed(0)
        self.op, self.checkpointing = op, checkpointing
        self.attention = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def layer(self, x, i):
        q, k, v = self.attention[i](x).unflatten(-1, (6, 16)).split(2, 2)
        return self.mlp[i](self.op(q, k, v, layer=i).flatten(2)) + x

    def forward(self, x):
        for i in range(len(self.mlp)):
            x = checkpoint(self.layer, x, i, **self.checkpointing) if self.checkpointing else self.layer(x, i)
        return x


def grads(model, *losses):
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same_bits(got, expected):
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected):
        assert torch.equal(a, b) and b.abs().max() > 0


def inputs(seed=0, seq_len=100):
    return torch.randn(1, seq_len, 32, generator=torch.Generator().manual_seed(seed))


def is_empty(op) -> bool:
    return not any(op.store.pending.values())


def test_checkpointing_changes_no_bit_and_builds_once():
    results = []
    for checkpointing in ({}, {"use_reentrant": False}):
        op, pattern = fresh_operator()
        model = Layers(op, **checkpointing)
        results.append(grads(model, model(inputs()).square().mean()))
        assert len(pattern.built) == 3
        assert is_empty(op)
    assert_same_bits(results[1], results[0])


def test_exact_ties_are_broken_once():
    """Constant rows: every key has the same mass."""
    x = inputs()[:, :1].expand(-1, 100, -1)
    results = []
    for checkpointing in ({}, {"use_reentrant": False}):
        op = Operator(AttentionConfig(**SETTINGS), Ring.single(), "cpu")
        model = Layers(op, **checkpointing)
        results.append(grads(model, (model(x) * inputs(1)).sum()))
    assert_same_bits(results[1], results[0])


def test_steps_with_accumulation():
    results = []
    for checkpointing in ({}, {"use_reentrant": False}):
        op, pattern = fresh_operator()
        model = Layers(op, **checkpointing)
        for seed in range(3):  # gradients add up
            model(inputs(seed)).square().mean().backward()
            assert is_empty(op)
        results.append([p.grad for p in model.parameters()])
        assert len(pattern.built) == 9
    assert_same_bits(results[1], results[0])


def two_calls(order, **checkpointing):
    """(gradients, those of each call alone) of two forwards whose backwards come in the given order."""
    op, _ = fresh_operator()
    plain = Layers(op, layers=1)
    expected = [grads(plain, plain(inputs(seed)).square().mean()) for seed in (0, 1)]
    op, _ = fresh_operator()
    model = Layers(op, layers=1, **checkpointing)
    losses = [model(inputs(seed)).square().mean() for seed in (0, 1)]
    got = [grads(model, losses[i]) for i in order]
    assert is_empty(op)
    return got, [expected[i] for i in order]


@pytest.mark.parametrize(
    ("order", "checkpointing"), [((0, 1), {}), ((1, 0), {}), ((1, 0), {"use_reentrant": False})], ids=str
)
def test_two_forwards_before_two_backwards(order, checkpointing):
    for got, expected in zip(*two_calls(order, **checkpointing)):
        assert_same_bits(got, expected)


def test_a_checkpointed_forward_that_gets_the_index_of_another_is_an_error():
    """The store is last-in first-out: going back to the first forward first would take the second one's index."""
    with pytest.raises(RuntimeError, match="reverse order"):
        two_calls((0, 1), use_reentrant=False)


@pytest.mark.parametrize("checkpointing", [{}, {"use_reentrant": False}], ids=["plain", "checkpointed"])
def test_one_backward_of_two_calls(checkpointing):
    """A model that runs its layer twice in one graph."""
    results = []
    for mode in ({}, checkpointing):
        op, _ = fresh_operator()
        model = Layers(op, layers=1, **mode)
        results.append(grads(model, (model(model(inputs())) + model(inputs(1))).square().mean()))
        assert is_empty(op)
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("checkpointing", [{}, {"use_reentrant": False}], ids=["plain", "checkpointed"])
def test_an_evaluation_between_forward_and_backward(checkpointing):
    op, pattern = fresh_operator()
    model = Layers(op, **checkpointing)
    expected = grads(model, model(inputs()).square().mean())
    pattern.built.clear()
    loss = model(inputs()).square().mean()
    with torch.no_grad():
        model(inputs(5))
        model(inputs(6, seq_len=40))
    assert_same_bits(grads(model, loss), expected)
    assert is_empty(op)


def test_a_forward_without_gradients_keeps_nothing():
    op, pattern = fresh_operator()
    with torch.no_grad():
        op(*(x.requires_grad_() for x in make_qkv(50)[:3]))
    with torch.inference_mode():
        op(*make_qkv(50)[:3])
    assert len(pattern.built) == 2 and is_empty(op)


def test_a_forward_whose_backward_never_comes():
    """A skipped step leaves an index behind; the next steps are right all the same, and there is a bound."""
    op, pattern = fresh_operator()
    model = Layers(op, use_reentrant=False)
    for _ in range(2 * MOST_PENDING):
        model(inputs(9))
    assert all(len(waiting) <= MOST_PENDING for waiting in op.store.pending.values())
    pattern.built.clear()
    got = grads(model, model(inputs()).square().mean())
    op, _ = fresh_operator()
    plain = Layers(op)
    assert_same_bits(got, grads(plain, plain(inputs()).square().mean()))


def test_reentrant_checkpointing_is_named_in_the_error():
    op, _ = fresh_operator()
    model = Layers(op, use_reentrant=True)
    with pytest.raises(RuntimeError, match="layer 2.*use_reentrant=False"):
        model(inputs().requires_grad_()).sum().backward()


def test_more_forwards_than_the_store_holds_is_an_error():
    op, _ = fresh_operator()
    model = Layers(op, layers=1, use_reentrant=False)
    losses = [model(inputs(seed)).square().mean() for seed in range(MOST_PENDING + 1)]
    for loss in losses[:0:-1]:
        loss.backward()
    with pytest.raises(RuntimeError, match=f"layer 0.*at most {MOST_PENDING} forward passes"):
        losses[0].backward()


def test_calls_of_two_lengths_that_go_back_in_the_wrong_order():
    """The index of the longer call would have keys that the shorter one has not."""
    op, results = Operator(AttentionConfig(**SETTINGS), Ring.single(), "cpu"), []
    for length in (40, 100):
        q, k, v, _ = (x.requires_grad_() for x in make_qkv(length))
        results.append(checkpoint(op, q, k, v, use_reentrant=False).sum())
    with pytest.raises(RuntimeError, match=r"layer 0: .* reverse order .*; got q \(1, 100, .* expected q \(1, 40, "):
        results[0].backward()


def test_a_frozen_attention_in_a_checkpointed_layer():
    """q, k, v need no gradient, yet the layer is run again for its MLP."""
    results = []
    for checkpointing in ({}, {"use_reentrant": False}):
        op, _ = fresh_operator()
        model = Layers(op, layers=1, **checkpointing)
        model.attention.requires_grad_(False)
        results.append(grads(model, model(inputs()).square().mean()))
    assert_same_bits(results[1], results[0])


def test_a_graph_can_go_back_twice():
    op, _ = fresh_operator()
    model = Layers(op)
    loss = model(inputs()).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, list(model.parameters())), first)


def test_layers_keep_their_own_indices():
    store = IndexStore()
    built = [(layer, f"index {i}") for i, layer in enumerate((0, 1, 0))]
    tokens = [store.keep(layer, 1, name).token for layer, name in built]
    assert len(set(tokens)) == 3
    assert [[kept.index for kept in store.pending[layer]] for layer in (0, 1)] == [["index 0", "index 2"], ["index 1"]]
    store.drop(tokens[0])
    store.drop(tokens[0])
    assert [[kept.index for kept in store.pending[layer]] for layer in (0, 1)] == [["index 2"], ["index 1"]]


def counted_passes(monkeypatch) -> list:
    """A list that grows with every forward pass of attention."""
    passes, forward = [], ops_passes._forward
    monkeypatch.setattr(ops_passes, "_forward", lambda *arguments: passes.append(1) or forward(*arguments))
    return passes


@pytest.mark.parametrize("keep_output", [False, True])
def test_kept_outputs_spare_the_second_pass_and_change_no_bit(keep_output, monkeypatch):
    plain = Layers(fresh_operator()[0])
    expected = grads(plain, plain(inputs()).square().mean())
    passes = counted_passes(monkeypatch)
    op, pattern = fresh_operator(keep_output=keep_output)
    model = Layers(op, use_reentrant=False)
    assert_same_bits(grads(model, model(inputs()).square().mean()), expected)
    assert len(passes) == (3 if keep_output else 6) and len(pattern.built) == 3 and is_empty(op)


def test_kept_outputs_without_checkpointing():
    results = []
    for keep_output in (False, True):
        op, _ = fresh_operator(keep_output=keep_output)
        model = Layers(op)
        results.append(grads(model, model(inputs()).square().mean()))
        assert is_empty(op)
    assert_same_bits(results[1], results[0])


def test_an_output_that_the_layer_changes_in_place_is_an_error():
    op, _ = fresh_operator(keep_output=True)
    model = Layers(op, use_reentrant=False)
    inner = model.op

    def changing(*arguments, **options):
        out = inner(*arguments, **options)
        with torch.no_grad():
            out.mul_(2)
        return out

    model.op = changing
    with pytest.raises(RuntimeError, match="keep_output=true .* changed in place"):
        model(inputs()).square().mean().backward()


def test_the_given_index_is_used():
    """The stub of these tests does what it says."""
    index = make_index(100, 4, 16)
    op = operator_of(index)
    op(*make_qkv(100)[:3])
    assert op.last[0][0] is index
