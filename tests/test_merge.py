"""Merging partial attention: exact where one side is empty, the softmax of both where neither is."""

import math

import pytest
import torch
from helpers import make_qkv, rms_ratio

from mtraining_nns.ops.kernels import triton_rows
from mtraining_nns.ops.merge import Partial, merge
from mtraining_nns.ops.reference import causal_mask, masked_attention

SHAPE = (2, 37, 3, 16)


def part(seed=0, shift=0.0, dtype=torch.float32) -> Partial:
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(SHAPE, generator=g).to(dtype)
    return Partial(out, torch.randn(SHAPE[0], SHAPE[2], SHAPE[1], generator=g) * 5 + shift)


def nothing() -> Partial:
    return Partial(torch.zeros(SHAPE), torch.full((SHAPE[0], SHAPE[2], SHAPE[1]), -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merging_with_nothing_changes_no_bit(dtype):
    a = part(dtype=dtype)
    for merged in (merge(a, nothing()), merge(nothing(), a)):
        assert torch.equal(merged.out, a.out.float())
        assert torch.equal(merged.lse, a.lse)


def test_nothing_and_nothing_is_nothing():
    merged = merge(nothing(), nothing())
    assert torch.equal(merged.out, nothing().out)
    assert torch.equal(merged.lse, nothing().lse)


def test_without_a_first_part_the_second_is_the_result():
    a = part()
    assert merge(None, a) is a


def test_rows_that_saw_nothing_on_one_side_only():
    a, b = part(0), part(1)
    a.lse[:, :, ::3], a.out[:, ::3] = -torch.inf, 0
    b.lse[:, :, 1::3], b.out[:, 1::3] = -torch.inf, 0
    merged = merge(a, b)
    assert torch.equal(merged.out[:, ::3], b.out[:, ::3]) and torch.equal(merged.lse[:, :, ::3], b.lse[:, :, ::3])
    assert torch.equal(merged.out[:, 1::3], a.out[:, 1::3]) and torch.equal(merged.lse[:, :, 1::3], a.lse[:, :, 1::3])
    assert merged.out.isfinite().all() and merged.lse.isfinite().all()


def test_formula_in_fp64():
    a, b = part(0), part(1, shift=2.0)
    merged = merge(a, b)
    lse = torch.log(a.lse.double().exp() + b.lse.double().exp())
    share = [(x.lse.double() - lse).exp().transpose(1, 2)[..., None] for x in (a, b)]
    assert rms_ratio(merged.lse, lse) < 1e-6
    assert rms_ratio(merged.out, share[0] * a.out + share[1] * b.out) < 1e-6


@pytest.mark.parametrize("shift", [-1e4, -200.0, 200.0, 1e4])
def test_no_overflow_for_any_size_of_scores(shift):
    a, b = part(0, shift), part(1, shift)
    merged, plain = merge(a, b), merge(Partial(a.out, a.lse - shift), Partial(b.out, b.lse - shift))
    assert rms_ratio(merged.out, plain.out) < abs(shift) * 2**-22  # what fp32 resolves beside `shift`
    assert rms_ratio(merged.lse, plain.lse + shift) < 1e-6
    far = merge(a, Partial(b.out, b.lse - 2e4))
    assert torch.equal(far.out, a.out) and torch.equal(far.lse, a.lse)


def test_parts_of_the_keys_merge_to_the_whole():
    q, k, v, _ = make_qkv(60, heads=3, kv_heads=3)
    mask = causal_mask(60)
    whole = masked_attention(q, k, v, mask)
    cuts = [0, 7, 30, 31, 60]
    merged = None
    for first, last in zip(cuts[:-1], cuts[1:]):
        merged = merge(merged, Partial(*masked_attention(q, k[:, first:last], v[:, first:last], mask[..., first:last])))
    assert rms_ratio(merged.out, whole[0]) < 1e-6
    assert rms_ratio(merged.lse, whole[1]) < 1e-6


def test_results_are_fp32():
    merged = merge(part(0, dtype=torch.bfloat16), part(1, dtype=torch.bfloat16))
    assert merged.out.dtype == merged.lse.dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, for CUDA tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_does_the_same(dtype):
    a, b = part(0), part(1, shift=2.0, dtype=dtype)
    a.lse[:, :, ::3], a.out[:, ::3] = -torch.inf, 0
    b.lse[:, :, ::2], b.out[:, ::2] = -torch.inf, 0
    expected, got = merge(a, b), triton_rows.merge(a, b, None)
    assert rms_ratio(got.out, expected.out) < 1e-6
    none = expected.lse == -torch.inf
    assert none.any() and torch.equal(got.lse == -torch.inf, none) and not got.out[none.transpose(1, 2)].any()
    assert rms_ratio(got.lse[~none], expected.lse[~none]) < 1e-6
    for one, other in ((a, nothing()), (nothing(), a)):
        alone = triton_rows.merge(one, other, None)
        assert torch.equal(alone.out, a.out) and torch.equal(alone.lse, a.lse)
    batch, length, heads, dim = a.out.shape
    room = torch.full((batch, length, heads + 2, dim), 7.0, dtype=torch.float16)
    into = room[:, :, 1:-1]
    assert triton_rows.merge(a, b, into).out is into and torch.equal(into, got.out.half())
    assert (room[:, :, 0] == 7).all() and (room[:, :, -1] == 7).all()
    turned = Partial(b.out.transpose(1, 2).contiguous().transpose(1, 2), b.lse)  # dense, in another order
    assert torch.equal(triton_rows.merge(a, turned, None).out, got.out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, for CUDA tensors")
def test_rows_head_by_head():
    q, dout, out = torch.randn(3, 2, 70, 5, 16)[:, :, :, 1:4]  # heads among others
    lse = torch.randn(2, 3, 70)
    lse[0, 0, :9] = -torch.inf
    rows = triton_rows.head_rows(q, dout, out, lse, 128)
    assert rows.q.shape == rows.dout.shape == (2, 3, 128, 16) and rows.lse.shape == rows.delta.shape == (2, 3, 128)
    assert torch.equal(rows.q[:, :, :70], q.transpose(1, 2)) and torch.equal(rows.dout[:, :, :70], dout.transpose(1, 2))
    assert not rows.q[:, :, 70:].any() and not rows.dout[:, :, 70:].any() and not rows.delta[:, :, 70:].any()
    seen = lse > -torch.inf
    assert (rows.lse[:, :, 70:] == torch.inf).all() and (rows.lse[:, :, :70][~seen] == torch.inf).all()
    assert rms_ratio(rows.lse[:, :, :70][seen], lse[seen] / math.log(2)) < 1e-6
    assert rms_ratio(rows.delta[:, :, :70], (dout * out).sum(-1).transpose(1, 2)) < 1e-5
