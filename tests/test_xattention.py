"""XAttention against its rule stated plainly, one token and one group at a time."""

from itertools import product

import pytest
import torch
from helpers import assert_close, block_mask, make_qkv, reference, rms_ratio, with_grads

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place, xattention
from mtraining_nns.ops.reference import causal_mask
from mtraining_nns.ops.ring import Ring

FEW = {"pattern": "xattention", "block": 16, "stride": 4, "threshold": 0.5}


def build(q, k, config, scale=None, seq_len=None):
    place = Place(Layout(seq_len=seq_len or q.shape[1], block=config.block), Ring.single())
    return xattention.build(q, k, place, config, q.shape[-1] ** -0.5 if scale is None else scale)


def index_mask(index, seq_len):
    """bool [B, N, S, S]: the pairs that the lists of one rank keep."""
    return block_mask(index.blocks(index.starts, index.starts, diagonal=True), seq_len, seq_len)


def xattention_mask(q, k, config, scale=None):
    """bool [B, N, S, S]: the rule, one head at a time."""
    batch, seq_len, heads, dim = q.shape
    scale, block = dim**-0.5 if scale is None else scale, config.block
    mask = torch.zeros(batch, heads, seq_len, seq_len, dtype=torch.bool)
    for b, n in product(range(batch), range(heads)):
        scores = plain_scores(q[b, :, n].float(), k[b, :, n * k.shape[2] // heads].float(), config, scale)
        for i, row in enumerate(scores):
            for j in plain_choice(row, config.threshold) | {i}:
                mask[b, n, i * block : (i + 1) * block, j * block : (j + 1) * block] = True
    return mask & causal_mask(seq_len)


def plain_scores(q, k, config, scale) -> list[list[float]]:
    """Of each query block i: the mass of key blocks 0 to i. q, k [S, D]."""

    def token(x, position):
        return x[position] if position < len(x) else torch.zeros(x.shape[1])

    stride = config.stride
    scores = [[0.0] * (i + 1) for i in range(-(-len(q) // config.block))]
    for a in range(-(-len(q) // stride)):
        logits = torch.zeros(a + 1)
        for b, t in product(range(a + 1), range(stride)):
            logits[b] += token(q, a * stride + stride - 1 - t) @ token(k, b * stride + t)
        for b, weight in enumerate(torch.softmax(logits * scale / stride, 0).tolist()):
            scores[a * stride // config.block][b * stride // config.block] += weight
    return scores


def plain_choice(row: list[float], threshold: float) -> set[int]:
    reached, kept = 0.0, set()
    for j in sorted(range(len(row)), key=lambda j: (-row[j], j)):
        if threshold < 1.0 and reached >= threshold * sum(row):
            break
        kept.add(j)
        reached += row[j]
    return kept


@pytest.mark.parametrize(
    "settings", [{}, {"threshold": 0.05}, {"threshold": 0.9}, {"stride": 16}, {"stride": 1}], ids=str
)
@pytest.mark.parametrize("seq_len", [1, 15, 17, 63, 65, 100])
def test_index_is_the_rule(settings, seq_len):
    config = AttentionConfig(**{**FEW, **settings})
    q, k, _, _ = make_qkv(seq_len)
    assert torch.equal(index_mask(build(q, k, config), seq_len), xattention_mask(q, k, config))


def test_index_is_the_rule_at_length_1000():
    config = AttentionConfig(pattern="xattention", block=64, threshold=0.6)
    q, k, _, _ = make_qkv(1000, 2, 1)
    assert torch.equal(index_mask(build(q, k, config), 1000), xattention_mask(q, k, config))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 2), (3, 3)])
def test_index_is_the_rule_for_any_ratio_of_heads_batch_and_scale(heads, kv_heads):
    config = AttentionConfig(**FEW)
    q, k, _, _ = make_qkv(75, heads, kv_heads, batch=2)
    masks = [index_mask(build(q, k, config, scale), 75) for scale in (0.05, 1.0)]
    for mask, scale in zip(masks, (0.05, 1.0)):
        assert torch.equal(mask, xattention_mask(q, k, config, scale))
    assert not torch.equal(*masks)


def test_heads_and_rows_taken_in_several_goes_give_the_same_index(monkeypatch):
    config = AttentionConfig(**FEW)
    q, k, _, _ = make_qkv(300, 8, 4, batch=2)
    whole = build(q, k, config).mask
    for name, size in (("SUMS_BYTES", 1), ("CHUNK_ELEMENTS", 1), ("CHUNK_ELEMENTS", 2 * 8 * 4 * 76 * 3)):
        monkeypatch.setattr(xattention, name, size)
        assert torch.equal(build(q, k, config).mask, whole)


@pytest.mark.parametrize("seq_len", [1, 63, 65, 1000])
def test_threshold_1_is_dense(seq_len):
    settings = {**FEW, "threshold": 1.0}
    inputs = make_qkv(seq_len, batch=2)
    index = build(*inputs[:2], AttentionConfig(**settings))
    assert torch.equal(index_mask(index, seq_len), causal_mask(seq_len).expand(2, 4, -1, -1))
    assert index.density(seq_len).item() == pytest.approx(1.0, rel=1e-12)
    ref = reference(*inputs, causal_mask(seq_len))
    del ref["lse"]
    got = with_grads(Operator(AttentionConfig(**settings), Ring.single(), "cpu"), *inputs)
    assert_close(got, ref, 1e-5, floor=1.0 if seq_len == 1 else 0.0)


def test_keep_few_differs_from_dense_and_is_masked_attention():
    inputs = make_qkv(500, batch=2)
    index = build(*inputs[:2], AttentionConfig(**FEW))
    assert index.density(500).item() < 0.6
    sparse = with_grads(Operator(AttentionConfig(**FEW), Ring.single(), "cpu"), *inputs)
    dense = with_grads(Operator(AttentionConfig(block=16, pattern="dense"), Ring.single(), "cpu"), *inputs)
    assert all(rms_ratio(sparse[name], dense[name]) > 0.05 for name in sparse)
    ref = reference(*inputs, index_mask(index, 500))
    del ref["lse"]
    assert_close(sparse, ref, 1e-5)


def test_the_diagonal_is_kept_where_it_has_no_mass():
    """Every query loves the first block."""
    q, k = torch.ones(1, 128, 1, 16), torch.zeros(1, 128, 1, 16)
    k[:, :16] = 50.0
    mask = build(q, k, AttentionConfig(**FEW)).mask[0, 0]
    assert mask.nonzero().tolist() == [[i, 0] for i in range(8)]
    pairs = index_mask(build(q, k, AttentionConfig(**FEW)), 128)[0, 0]
    assert all(pairs[row, row // 16 * 16 : row + 1].all() for row in range(128))


def test_ties_go_to_the_earlier_block():
    """All weights of a query are alike: block 9 gives each of 9 earlier blocks some 10 % of its mass."""
    q, k = torch.zeros(1, 160, 2, 16), torch.randn(1, 160, 2, 16)
    for threshold, kept in ((0.05, 1), (0.25, 3), (0.5, 5)):
        mask = build(q, k, AttentionConfig(**{**FEW, "threshold": threshold})).mask
        assert mask[0, :, 9].nonzero().tolist() == [[n, j] for n in range(2) for j in range(kept)]


def test_an_antidiagonal_pairs_the_last_query_of_a_group_with_the_first_key():
    """Loud where offset of query + offset of key = stride - 1; the neighbouring pairs would find another block."""
    q, k = torch.zeros(1, 64, 1, 16), torch.zeros(1, 64, 1, 16)
    q[:, 48::4, :, 0] = 9.0  # first query of each group of the last block
    k[:, 16 + 3, :, 0] = 9.0  # last key of a group of block 1
    k[:, 32, :, 0] = 90.0  # first key of a group of block 2, which no such query meets
    mask = build(q, k, AttentionConfig(**FEW), 1.0).mask[0, 0, 3]
    assert mask.tolist() == [False, True, False, False]


@pytest.mark.parametrize("seq_len", [33, 45, 62])
def test_what_padding_holds_changes_nothing(seq_len):
    config = AttentionConfig(**FEW)
    q, k, _, _ = make_qkv(64, batch=2)
    expected = build(q[:, :seq_len], k[:, :seq_len], config).mask
    q, k = (x[:, : -(-seq_len // 16) * 16] for x in (q, k))
    for rubbish in (9.0, torch.nan):
        q[:, seq_len:], k[:, seq_len:] = rubbish, rubbish
        assert torch.equal(build(q, k, config, seq_len=seq_len).mask, expected)


def test_low_precision_inputs_are_estimated_in_fp32():
    q, k = (x.bfloat16() for x in make_qkv(300)[:2])
    config = AttentionConfig(**FEW)
    assert torch.equal(build(q, k, config).mask, build(q.float(), k.float(), config).mask)
