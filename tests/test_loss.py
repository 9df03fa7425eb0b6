"""The chunked loss against torch's cross entropy on full logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mtraining_nns.loss import IGNORE, linear_cross_entropy, token_losses


def inputs(shape=(2, 65), features=24, words=101, ignored=0.3, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(words, features, dtype=dtype, requires_grad=True)
    labels = torch.randint(words, shape)
    labels[torch.rand(shape) < ignored] = IGNORE
    return hidden, weight, labels


def full(hidden, weight, labels, reduction="sum"):
    logits = (hidden @ weight.t()).float().flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction=reduction)


def ratio(x, ref):
    return ((x.float() - ref.float()).square().mean() / ref.float().square().mean()).sqrt().item()


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("shape", [(1, 1), (2, 63), (3, 65)])
def test_equals_cross_entropy(chunk, shape):
    hidden, weight, labels = inputs(shape, ignored=0.3 if shape[1] > 1 else 0.0)
    expected = torch.autograd.grad(full(hidden, weight, labels) / 7, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    found = torch.autograd.grad(loss / 7, (hidden, weight))
    assert loss.dtype == torch.float32
    assert ratio(loss, full(hidden, weight, labels)) < 1e-6
    assert all(ratio(x, ref) < 1e-5 for x, ref in zip(found, expected))


def test_token_losses_have_the_shape_of_the_labels_and_are_zero_where_ignored():
    hidden, weight, labels = inputs()
    losses = token_losses(hidden, weight, labels, chunk=9)
    assert losses.shape == labels.shape and not losses[labels == IGNORE].any()
    assert ratio(losses.flatten(), full(hidden, weight, labels, "none")) < 1e-6


def test_all_labels_ignored_gives_zero_not_nan():
    hidden, weight, labels = inputs(ignored=1.1)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=16)
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_bf16_is_as_exact_as_torch_in_bf16():
    hidden, weight, labels = inputs((1, 512), features=64, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    truth = torch.autograd.grad(full(*exact, labels), exact)
    plain = torch.autograd.grad(full(hidden, weight, labels), (hidden, weight))
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk=64), (hidden, weight))
    for x, torchs, ref in zip(found, plain, truth):
        assert x.dtype == torch.bfloat16
        assert ratio(x, ref) < max(5e-3, 1.2 * ratio(torchs, ref))


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_side_gets_no_gradient_and_the_other_the_same(frozen):
    pair = inputs()
    expected = torch.autograd.grad(full(*pair), pair[1 - frozen])
    pair[frozen].requires_grad_(False)
    found = torch.autograd.grad(linear_cross_entropy(*pair, chunk=16), pair[1 - frozen])
    assert ratio(found[0], expected[0]) < 1e-5


def test_extreme_logits_stay_finite():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden * 1e4, weight, labels, chunk=16)
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary():
    hidden, weight, labels = inputs((1, 4096), features=8, words=500)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=64).backward()
    assert seen.elements <= max(64 * 500, 4096 * 8)


def test_without_gradients_none_is_computed(monkeypatch):
    hidden, weight, labels = inputs()
    monkeypatch.delattr("mtraining_nns.loss._add_chunk")
    with torch.no_grad():
        assert ratio(linear_cross_entropy(hidden, weight, labels), full(hidden, weight, labels)) < 1e-6


def test_second_backward_is_refused():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"\(2, 65, 24\), \(101, 24\), \(2, 64\)"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])


@pytest.mark.gpu
def test_memory_of_a_long_sequence_and_a_large_vocabulary():
    tokens, words, features = 65536, 151936, 2048
    hidden = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(words, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (linear_cross_entropy(hidden, weight, labels) / tokens).backward()
    assert torch.cuda.max_memory_allocated() - before < 3e9
