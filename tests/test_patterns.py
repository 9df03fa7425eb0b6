"""Vertical-slash against algorithm 1 stated plainly, its budgets, and what is kept in any case."""

from dataclasses import replace

import pytest
import torch
from helpers import index_mask, make_qkv, rms_ratio

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import NO_COLUMN
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.reference import causal_mask, masked_attention, vertical_slash_mask
from mtraining_nns.ops.ring import Ring

BARE = {"block": 16, "sinks": 0, "local": 0}  # nothing but what the budgets choose, and the diagonal


def build(q, k, config, scale=None):
    place = Place(Layout(seq_len=q.shape[1], block=config.block), Ring.single())
    return vertical_slash.build(q, k, place, config, q.shape[-1] ** -0.5 if scale is None else scale)


def peaked(seq_len, heads=4, kv_heads=2, *, batch=1, seed=0):
    """q, k with a few loud keys and a loud diagonal band, so that small budgets have something to find."""
    q, k, _, _ = make_qkv(seq_len, heads, kv_heads, batch=batch, seed=seed)
    return q * 1.5, k


CONFIGS = {
    "top-p": {"p_v": 0.6, "p_s": 0.5},
    "top-p, little": {"p_v": 0.05, "p_s": 0.05, **BARE},
    "top-p, columns only": {"p_v": 0.9, "p_s": 1e-6, **BARE},
    "top-p, slashes only": {"p_v": 1e-6, "p_s": 0.9, **BARE},
    "top-p, capped": {"p_v": 0.95, "p_s": 0.1, "cap": 7, **BARE},
    "fixed": {"budget": "fixed", "k_v": 9, "k_s": 2},
    "fixed, one each": {"budget": "fixed", "k_v": 1, "k_s": 1, **BARE},
    "fixed, capped": {"budget": "fixed", "k_v": 30, "k_s": 1, "cap": 11, **BARE},
    "sinks and local": {"budget": "fixed", "k_v": 1, "k_s": 1, "sinks": 20, "local": 40},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seq_len", [1, 15, 17, 63, 65, 100])
def test_index_is_algorithm_1(name, seq_len):
    config = AttentionConfig(**{"block": 16, "sinks": 4, "local": 16, "last_q": 16, **CONFIGS[name]})
    q, k = peaked(seq_len)
    assert torch.equal(index_mask(build(q, k, config), seq_len), vertical_slash_mask(q, k, config))


@pytest.mark.parametrize("last_q", [1, 7, 33, 64])
@pytest.mark.parametrize("block", [16, 32])
def test_index_is_algorithm_1_for_any_number_of_last_queries(last_q, block):
    config = AttentionConfig(block=block, last_q=last_q, sinks=2, local=0, p_v=0.3, p_s=0.3)
    for seq_len in (50, 129):
        q, k = peaked(seq_len, seed=last_q)
        assert torch.equal(index_mask(build(q, k, config), seq_len), vertical_slash_mask(q, k, config))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 2), (3, 3)])
def test_index_is_algorithm_1_for_any_ratio_of_heads_batch_and_scale(heads, kv_heads):
    config = AttentionConfig(last_q=8, p_v=0.4, p_s=0.3, **BARE)
    q, k = peaked(75, heads, kv_heads, batch=2)
    for scale in (0.05, 0.4):
        assert torch.equal(index_mask(build(q, k, config, scale), 75), vertical_slash_mask(q, k, config, scale))
    assert not torch.equal(index_mask(build(q, k, config, 0.05), 75), index_mask(build(q, k, config, 0.4), 75))


def test_heads_taken_in_several_goes_give_the_same_index(monkeypatch):
    config = AttentionConfig(last_q=8, p_v=0.4, p_s=0.3, **BARE)
    q, k = peaked(75, 8, 2)
    whole = index_mask(build(q, k, config), 75)
    for elements in (1, 8 * 75 * 2, 8 * 75 * 3):
        monkeypatch.setattr(vertical_slash, "CHUNK_ELEMENTS", elements)
        assert torch.equal(index_mask(build(q, k, config), 75), whole)


KEEP_ALL = [{"p_v": 1.0}, {"p_s": 1.0}, {"p_v": 1.0, "p_s": 1.0}, {"budget": "fixed", "k_v": 1000, "k_s": 1}]
KEEP_ALL += [{"budget": "fixed", "k_v": 1, "k_s": 6096}, {"budget": "fixed", "k_v": 1000, "k_s": 6096}]


@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 100, 127, 129, 512])
@pytest.mark.parametrize("budget", KEEP_ALL, ids=str)
def test_keep_all_is_dense(budget, seq_len):
    """Also budgets larger than the sequence: they clamp."""
    settings = {"p_v": 1e-6, "p_s": 1e-6, **BARE, **budget}
    q, k, v, _ = make_qkv(seq_len)
    index = build(q, k, AttentionConfig(**settings))
    assert torch.equal(index_mask(index, seq_len), causal_mask(seq_len).expand(1, 4, -1, -1))
    assert index.density(seq_len).item() == pytest.approx(1.0, rel=1e-12)
    assert index.capped.item() == 0
    out = Operator(AttentionConfig(**settings), Ring.single(), "cpu")(q, k, v)
    assert rms_ratio(out, masked_attention(q, k, v, causal_mask(seq_len))[0]) < 1e-5


def test_keep_few_differs_from_dense():
    q, k, v, _ = make_qkv(512)
    few = {"budget": "fixed", "k_v": 8, "k_s": 1, **BARE}
    assert build(q, k, AttentionConfig(**few)).density(512).item() < 0.3
    sparse = Operator(AttentionConfig(**few), Ring.single(), "cpu")(q, k, v)
    dense = Operator(AttentionConfig(**few, pattern="dense"), Ring.single(), "cpu")(q, k, v)
    assert rms_ratio(sparse, dense) > 0.1


@pytest.mark.parametrize("share", [0.05, 0.95])
@pytest.mark.parametrize("seed", range(3))
def test_sinks_local_band_and_diagonal_are_always_kept(seed, share):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, 4096, 4, 32, generator=g), torch.randn(1, 4096, 2, 32, generator=g)
    index = build(q, k, AttentionConfig(p_v=share, p_s=share))
    assert torch.equal(index.columns.position[..., :64], torch.arange(64).expand(1, 4, -1).int())
    assert index.hit[..., : 1024 // 128 + 1].all()
    valid = torch.arange(index.columns.position.shape[-1]) < index.columns.count[..., None]
    assert torch.equal(index.columns.position != NO_COLUMN, valid)
    steps = index.columns.position.long().diff(dim=-1)
    assert (steps[valid[..., 1:]] > 0).all(), "columns rise and none occurs twice"


def test_every_distance_of_the_local_band_is_kept():
    config = AttentionConfig(budget="fixed", k_v=1, k_s=1, block=16, sinks=0, local=40)
    q, k = peaked(200)
    mask = index_mask(build(q, k, config), 200)
    rows, cols = torch.arange(200)[:, None], torch.arange(200)[None]
    assert mask[..., (rows >= cols) & (rows - cols < 40)].all()
    assert mask.float().mean() < 0.4


def test_a_loud_key_is_a_column_and_a_loud_distance_is_a_slash():
    """One key that every query loves and, in the other head, the key 50 tokens before each query."""
    seq_len = 256
    k = torch.zeros(1, seq_len, 2, 256)
    k[:, :, 1] = torch.eye(seq_len) * 40
    k[:, 77, 0] = 40.0
    q = torch.zeros(1, seq_len, 2, 256)
    q[:, :, 0] = 1.0
    q[:, 50:, 1] = torch.eye(seq_len)[: seq_len - 50] * 40
    config = AttentionConfig(p_v=0.9, p_s=0.9, last_q=32, **BARE)
    index = build(q, k, config)
    assert index.columns.position[0, 0, : index.columns.count[0, 0]].tolist() == [77]
    assert index.hit[0, 1].nonzero()[:, 0].tolist() == [0, 3, 4]  # distance 50 lies in bin 3: diagonals 3 and 4


def test_the_entry_that_crosses_p_is_kept():
    """Four columns with equal mass: p = 0.5 needs two, a hair more needs three."""
    k = torch.zeros(1, 64, 1, 16)
    k[:, [3, 9, 20, 31]] = 30.0
    q = torch.ones(1, 64, 1, 16)
    for share, kept in ((0.01, 1), (0.24, 1), (0.26, 2), (0.49, 2), (0.51, 3), (0.76, 4)):
        index = build(q, k, AttentionConfig(p_v=share, p_s=1e-6, last_q=8, **BARE))
        assert index.columns.count.item() == kept, share
        assert index.columns.position[0, 0, :kept].tolist() == [3, 9, 20, 31][:kept]


def test_ties_go_to_the_earlier_key():
    q, k = torch.zeros(1, 200, 2, 16), torch.randn(1, 200, 2, 16)
    index = build(q, k, AttentionConfig(budget="fixed", k_v=6, k_s=1, last_q=8, **BARE))
    assert index.columns.position[..., :6].tolist() == [[[0, 1, 2, 3, 4, 5]] * 2]
    assert index.columns.count.tolist() == [[6, 6]]


CAPPED = [
    ({"p_v": 0.95, "cap": 8}, 4),
    ({"p_v": 0.95, "cap": 199}, 0),
    ({"p_v": 1.0, "cap": 199}, 4),
    ({"p_v": 1.0, "cap": 200}, 0),
    ({"budget": "fixed", "k_v": 9, "cap": 8}, 4),
    ({"budget": "fixed", "k_v": 8, "cap": 8}, 0),
    ({"budget": "fixed", "k_v": 1000, "cap": 200}, 0),
]


@pytest.mark.parametrize(("settings", "heads"), CAPPED, ids=str)
def test_heads_that_reach_the_cap_are_counted(settings, heads):
    q, k, _, _ = make_qkv(200)
    index = build(q, k, AttentionConfig(**{"p_s": 0.1, **BARE, **settings}))
    assert index.capped.item() == heads
    assert index.capped.dtype == torch.int32
    if heads:
        assert (index.columns.count == settings["cap"]).all()


def test_only_heads_with_spread_mass_reach_the_cap():
    q, k, _, _ = make_qkv(200, 4, 4)
    q[:, :, :2] = 1.0
    k[:, 5, :2] = 50.0
    assert build(q, k, AttentionConfig(p_v=0.95, p_s=0.1, cap=8, **BARE)).capped.item() == 2


def test_masses_are_those_of_a_full_softmax():
    """Column and bin masses against softmax written out; each sums to the number of queries."""
    q, k = peaked(100, batch=2)
    config = AttentionConfig(last_q=16, **BARE)
    place = Place(Layout(seq_len=100, block=16), Ring.single())
    columns, bins = vertical_slash.masses(q, k, place, config, 0.25)
    scores = torch.einsum("bqnd,bknd->bnqk", q[:, 84:].double(), k.double().repeat_interleave(2, 2)) * 0.25
    weights = scores.masked_fill(~causal_mask(100)[..., 84:, :], -torch.inf).softmax(-1)
    assert rms_ratio(columns, weights.sum(2)) < 1e-6
    expected = torch.zeros(2, 4, 7, dtype=torch.double)
    distance = torch.arange(84, 100)[:, None] - torch.arange(100)
    for b in range(7):
        expected[..., b] = weights[..., distance // 16 == b].sum(-1)
    assert rms_ratio(bins, expected) < 1e-6
    assert torch.allclose(bins.sum(-1), torch.full((2, 4), 16.0), rtol=1e-5)


def test_the_index_ignores_values_beyond_the_estimate():
    """Only the last queries choose: others change nothing."""
    q, k = peaked(100)
    config = AttentionConfig(last_q=8, p_v=0.4, p_s=0.3, **BARE)
    other = q.clone()
    other[:, :92] = torch.randn(1, 92, 4, 16)
    assert torch.equal(index_mask(build(q, k, config), 100), index_mask(build(other, k, config), 100))
    other[:, 99] = -other[:, 99]
    assert not torch.equal(index_mask(build(q, k, config), 100), index_mask(build(other, k, config), 100))


def test_low_precision_inputs_are_estimated_in_fp32():
    q, k = (x.bfloat16() for x in peaked(100))
    config = AttentionConfig(last_q=16, p_v=0.5, p_s=0.3, **BARE)
    exact = build(q.float(), k.float(), config)
    assert torch.equal(index_mask(build(q, k, config), 100), index_mask(exact, 100))
    assert build(q, k, replace(config, p_v=1.0)).density(100).item() == pytest.approx(1.0, rel=1e-12)


def test_head_budgets_give_each_head_its_own():
    """As many settings as heads, one budget each; and the same again by layer through the operator."""
    q, k, v, _ = make_qkv(400, 4, 2, 16)
    pairs = ((3, 1), (40, 2), (7, 5), (400, 25))
    fixed = {"block": 16, "budget": "fixed", "sinks": 4, "local": 16, "last_q": 16}
    op = Operator(AttentionConfig(**fixed, head_budgets=(pairs[::-1], pairs)), Ring.single(), "cpu")
    op(q, k, v, layer=1)
    found = op.last[1][0]
    for head, (k_v, k_s) in enumerate(pairs):
        alone = Operator(AttentionConfig(**fixed, k_v=k_v, k_s=k_s), Ring.single(), "cpu")
        alone(q, k, v)
        expected = alone.last[0][0].heads(slice(head, head + 1))
        got = found.heads(slice(head, head + 1))
        assert torch.equal(got.hit, expected.hit)
        count = int(expected.columns.count)
        assert int(got.columns.count) == count
        assert torch.equal(got.columns.position[..., :count], expected.columns.position[..., :count])
    op(q, k, v, layer=0)
    assert int(op.last[0][0].columns.count[0, 0]) > int(found.columns.count[0, 0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"head_budgets": [[[1, 1]]]},
            "is for pattern vertical_slash with budget fixed, got vertical_slash with top_p",
        ),
        ({"budget": "fixed", "head_budgets": [[[1, 0]]]}, r"each a pair \(k_v, k_s\) of numbers from 1"),
        ({"budget": "fixed", "head_budgets": [[1, 1]]}, "must be a list of layers"),
        ({"budget": "fixed", "head_budgets": [[]]}, "must be a list of layers"),
        ({"budget": "fixed", "head_budgets": 3}, "must be a list, got 3"),
    ],
)
def test_head_budgets_that_are_none(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)


def test_head_budgets_of_another_model():
    config = AttentionConfig(budget="fixed", head_budgets=(((1, 1),) * 4,) * 3)
    with pytest.raises(ValueError, match="is for 3 layers, the model has 2"):
        config.check_layers(2)
    q, k, v, _ = make_qkv(64, 2, 1, 16)
    with pytest.raises(ValueError, match="a layer of 4 heads, the model has 2 query heads"):
        Operator(config, Ring.single(), "cpu")(q, k, v)
