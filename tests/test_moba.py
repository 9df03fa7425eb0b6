"""MoBA against its rule stated plainly, one query at a time."""

from itertools import product

import pytest
import torch
from helpers import assert_close, block_mask, make_qkv, reference, rms_ratio, with_grads

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place, moba
from mtraining_nns.ops.reference import causal_mask
from mtraining_nns.ops.ring import Ring

FEW = {"pattern": "moba", "block": 16, "chunk": 32, "top_k": 3}


def build(q, k, config, seq_len=None):
    place = Place(Layout(seq_len=seq_len or q.shape[1], block=config.block), Ring.single())
    return moba.build(q, k, place, config, 1.0)


def moba_mask(q, k, config):
    """bool [B, N, S, S]: the rule."""
    batch, seq_len, heads, _ = q.shape
    chunk = config.chunk
    mask = torch.zeros(batch, heads, seq_len, seq_len, dtype=torch.bool)
    for b, n in product(range(batch), range(heads)):
        keys = k[b, :, n * k.shape[2] // heads].float()
        gates = [keys[first : first + chunk].mean(0) for first in range(0, seq_len, chunk)]
        for i in range(seq_len):
            own = i // chunk
            scores = [(q[b, i, n].float() @ gates[c]).item() for c in range(own)]
            for c in sorted(range(own), key=lambda c: (-scores[c], c))[: config.top_k - 1]:
                mask[b, n, i, c * chunk : (c + 1) * chunk] = True
            mask[b, n, i, own * chunk : i + 1] = True
    return mask


def check_index(index, mask, block) -> None:
    """The pairs are those of the mask, and a block is listed where, and only where, one of its rows takes it."""
    seq_len = mask.shape[-1]
    blocks = index.blocks(index.starts, index.starts, diagonal=True)
    assert torch.equal(block_mask(blocks, seq_len, seq_len), mask)
    count = len(index.starts)
    padded = torch.nn.functional.pad(mask, (0, count * block - seq_len) * 2)
    listed = padded.unflatten(3, (count, block)).unflatten(2, (count, block)).any(5).any(3).tril(-1)
    assert torch.equal(blocks.by_query.to_mask(count), listed)
    assert torch.equal(blocks.by_key.to_mask(count), listed.transpose(-1, -2))


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 2, "chunk": 16}, {"chunk": 48, "top_k": 2}], ids=str)
@pytest.mark.parametrize("seq_len", [1, 15, 31, 63, 65, 100, 257])
def test_index_is_the_rule(settings, seq_len):
    config = AttentionConfig(**{**FEW, **settings})
    q, k, _, _ = make_qkv(seq_len)
    check_index(build(q, k, config), moba_mask(q, k, config), 16)


def test_index_is_the_rule_at_length_1000_with_two_words_of_bits():
    config = AttentionConfig(**{**FEW, "chunk": 16, "top_k": 5})
    q, k, _, _ = make_qkv(1000, 2, 1)
    index = build(q, k, config)
    assert index.row_bits.shape == (1, 2, 1000, 2) and index.row_bits.dtype == torch.int32
    check_index(index, moba_mask(q, k, config), 16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 2), (3, 3)])
def test_index_is_the_rule_for_any_ratio_of_heads_and_batch(heads, kv_heads):
    config = AttentionConfig(**FEW)
    q, k, _, _ = make_qkv(150, heads, kv_heads, batch=2)
    check_index(build(q, k, config), moba_mask(q, k, config), 16)


def test_rows_taken_in_several_goes_give_the_same_index(monkeypatch):
    config = AttentionConfig(**FEW)
    q, k, _, _ = make_qkv(295, batch=2)
    whole = build(q, k, config)
    for elements in (1, 2 * 4 * 10 * 48):
        monkeypatch.setattr(moba, "CHUNK_ELEMENTS", elements)
        parts = build(q, k, config)
        assert torch.equal(parts.mask, whole.mask) and torch.equal(parts.row_bits, whole.row_bits)


@pytest.mark.parametrize("seq_len", [1, 63, 65, 1000])
@pytest.mark.parametrize("top_k", [32, 1000])
def test_as_many_as_there_are_chunks_is_dense(seq_len, top_k):
    settings = {**FEW, "top_k": top_k}
    inputs = make_qkv(seq_len, batch=2)
    index = build(*inputs[:2], AttentionConfig(**settings))
    check_index(index, causal_mask(seq_len).expand(2, 4, -1, -1), 16)
    assert index.density(seq_len).item() == pytest.approx(1.0, rel=1e-12)
    ref = reference(*inputs, causal_mask(seq_len))
    del ref["lse"]
    got = with_grads(Operator(AttentionConfig(**settings), Ring.single(), "cpu"), *inputs)
    assert_close(got, ref, 1e-5, floor=1.0 if seq_len == 1 else 0.0)


@pytest.mark.parametrize(("seq_len", "heads"), [(257, (4, 2)), (500, (7, 1))])
def test_keep_few_differs_from_dense_and_is_masked_attention(seq_len, heads):
    inputs = make_qkv(seq_len, *heads, batch=2)
    mask = moba_mask(*inputs[:2], AttentionConfig(**FEW))
    sparse = with_grads(Operator(AttentionConfig(**FEW), Ring.single(), "cpu"), *inputs)
    dense = with_grads(Operator(AttentionConfig(block=16, pattern="dense"), Ring.single(), "cpu"), *inputs)
    assert all(rms_ratio(sparse[name], dense[name]) > 0.05 for name in sparse)
    ref = reference(*inputs, mask)
    del ref["lse"]
    assert_close(sparse, ref, 1e-5)


def test_ties_go_to_the_earlier_chunk():
    """Equal keys, and queries that no key moves."""
    q, k, _, _ = make_qkv(160)
    for inputs in ((q, k[:, :1].expand_as(k)), (torch.zeros_like(q), k)):
        bits = build(*inputs, AttentionConfig(**FEW)).row_bits[..., 0]
        for own, expected in enumerate((0b1, 0b11, 0b111, 0b1011, 0b10011)):
            assert (bits[:, :, own * 32 : (own + 1) * 32] == expected).all()


def test_a_loud_chunk_is_found_by_the_queries_that_look_for_it():
    q, k = torch.zeros(1, 128, 2, 16), torch.zeros(1, 128, 2, 16)
    k[:, 32:64, :, 0] = 1.0
    q[:, 96::2, :, 0], q[:, 97::2, :, 0] = 1.0, -1.0
    bits = build(q, k, AttentionConfig(**{**FEW, "top_k": 2})).row_bits[0, :, 96:, 0]
    assert (bits[:, ::2] == 0b1010).all() and (bits[:, 1::2] == 0b1001).all()


@pytest.mark.parametrize("seq_len", [33, 45, 62])
def test_what_padding_holds_changes_nothing(seq_len):
    config = AttentionConfig(**{**FEW, "chunk": 16, "top_k": 2})
    q, k, _, _ = make_qkv(64, batch=2)
    expected = build(q[:, :seq_len], k[:, :seq_len], config)
    q, k = (x[:, : -(-seq_len // 16) * 16] for x in (q, k))
    for rubbish in (9.0, torch.nan):
        q[:, seq_len:], k[:, seq_len:] = rubbish, rubbish
        index = build(q, k, config, seq_len)
        assert torch.equal(index.row_bits[:, :, :seq_len], expected.row_bits)
        # a row of padding takes its own chunk, here its own block
        assert torch.equal(index.mask.tril(-1), expected.mask.tril(-1))


def test_the_mean_of_a_short_chunk_is_that_of_its_keys():
    _, k, _, _ = make_qkv(75, batch=2)
    place = Place(Layout(seq_len=75, block=16), Ring.single())
    means = moba.chunk_means(k, place, 32)
    expected = torch.stack([part.mean(1) for part in k.split(32, 1)], 2)
    assert rms_ratio(means, expected) < 1e-6


def test_low_precision_inputs_are_estimated_in_fp32():
    q, k = (x.bfloat16() for x in make_qkv(300)[:2])
    config = AttentionConfig(**FEW)
    assert torch.equal(build(q, k, config).row_bits, build(q.float(), k.float(), config).row_bits)
