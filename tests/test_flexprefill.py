"""FlexPrefill against its rule stated plainly, one head and one query block at a time."""

from itertools import product

import pytest
import torch
from helpers import assert_close, block_mask, make_qkv, reference, with_grads

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place, flexprefill
from mtraining_nns.ops.ring import Ring

FEW = {"pattern": "flexprefill", "block": 16, "threshold": 0.4, "tau": 0.3, "sinks": 16, "local": 16}


def causal_mask(seq_len: int) -> torch.Tensor:
    return torch.ones(seq_len, seq_len, dtype=torch.bool).tril()


def build(q, k, config):
    place = Place(Layout(seq_len=q.shape[1], block=config.block), Ring.single())
    return flexprefill.build(q, k, place, config, q.shape[-1] ** -0.5)


def index_mask(index, seq_len):
    return block_mask(index.blocks(index.starts, index.starts, diagonal=True), seq_len, seq_len)


def plain_head(q, k, config) -> tuple[bool, set[tuple[int, int]]]:
    """(whether blocks are chosen by query, kept (query block, key block)). q, k fp64 [S, D] of one head."""
    seq_len, block, scale = len(q), config.block, q.shape[1] ** -0.5
    parts = [slice(first, min(first + block, seq_len)) for first in range(0, seq_len, block)]
    count, first = len(parts), max(0, seq_len - block)
    scores = (q[first:] @ k.T * scale).masked_fill(~causal_mask(seq_len)[first:], -torch.inf)
    weights = torch.softmax(scores, -1)
    looked = [weights[:, part].sum().item() / len(weights) for part in parts]
    means_q, means_k = (torch.stack([x[part].mean(0) for part in parts]) for x in (q, k))
    guessed = torch.softmax(means_k @ q[first:].mean(0) * scale, 0).tolist()
    kept = {(i, j) for i in range(count) for j in range(i + 1) if j * block < config.sinks or i - j <= 1}
    if distance(looked, guessed) < config.tau:
        shares = {}
        for i in range(count):
            row = torch.softmax(means_k[: i + 1] @ means_q[i] * scale, 0).tolist()
            shares |= {(i, j): share for j, share in enumerate(row)}
        return True, kept | fewest(shares, config.threshold)
    bins = dict.fromkeys(range(count), 0.0)
    for row, key in product(range(len(weights)), range(seq_len)):
        if key <= first + row:
            bins[(first + row - key) // block] += weights[row, key].item()
    columns = fewest(dict(enumerate(looked)), config.threshold)
    near = fewest(bins, config.threshold)
    return False, kept | {
        (i, j) for i in range(count) for j in range(i + 1) if j in columns or i - j in near or i - j - 1 in near
    }


def distance(a: list[float], b: list[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        middle = torch.tensor((x + y) / 2)
        total += sum((z * (torch.tensor(z) / middle).log()).item() / 2 for z in (x, y) if z > 0)
    return max(0.0, total) ** 0.5


def fewest(shares: dict, threshold: float) -> set:
    reached, kept, total = 0.0, set(), sum(shares.values())
    for place in sorted(shares, key=lambda place: -shares[place]):
        if threshold < 1 and reached >= threshold * total:
            break
        kept.add(place)
        reached += shares[place]
    return kept


@pytest.mark.parametrize("seq_len", [5, 16, 100, 161])
@pytest.mark.parametrize("heads", [(3, 1), (4, 2)])
def test_index_is_the_rule(seq_len, heads):
    q, k, _, _ = make_qkv(seq_len, *heads, 16, batch=2, seed=seq_len)
    q = q * torch.linspace(0.3, 4, heads[0])[:, None]  # from heads that attend evenly to heads that do not
    config = AttentionConfig(**FEW)
    mask, ways = index_mask(build(q, k, config), seq_len), set()
    for b, n in product(range(2), range(heads[0])):
        by_query, kept = plain_head(q[b, :, n].double(), k[b, :, n * heads[1] // heads[0]].double(), config)
        ways.add(by_query)
        expected = torch.zeros(seq_len, seq_len, dtype=torch.bool)
        for i, j in kept:
            expected[i * 16 : (i + 1) * 16, j * 16 : (j + 1) * 16] = True
        assert torch.equal(mask[b, n], expected & causal_mask(seq_len)), (b, n)
    assert seq_len < 100 or ways == {True, False}, "heads of one kind alone"


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_attention_and_gradients(tau):
    inputs = make_qkv(150, 4, 2, 16)
    op = Operator(AttentionConfig(**{**FEW, "tau": tau}), Ring.single(), "cpu")
    got = with_grads(op, *inputs)
    mask = index_mask(op.last[0][0], 150)
    assert 0.1 < mask.float().mean() < 0.45, "dense pairs are half of all"
    expected = reference(*inputs, mask)
    del expected["lse"]
    assert_close(got, expected, 1e-5)


def test_threshold_one_keeps_all():
    inputs = make_qkv(100, 2, 1, 16)
    op = Operator(AttentionConfig(**{**FEW, "threshold": 1.0}), Ring.single(), "cpu")
    op(*inputs[:3])
    assert torch.equal(index_mask(op.last[0][0], 100)[0, 0], causal_mask(100))


def test_padding_and_long_maps_change_nothing(monkeypatch):
    q, k, _, _ = make_qkv(200, 4, 4, 16, seed=3)
    whole = build(q, k, AttentionConfig(**FEW)).mask
    monkeypatch.setattr(flexprefill, "MAP_ELEMENTS", 1)
    assert torch.equal(build(q, k, AttentionConfig(**FEW)).mask, whole)


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_tau_out_of_range(value):
    with pytest.raises(ValueError, match=r"attention.tau must lie in \[0, 1\]"):
        AttentionConfig(**{**FEW, "tau": value})
