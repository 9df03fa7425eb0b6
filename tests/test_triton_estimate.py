"""The estimate's kernels against its plain torch, and the choice of columns against a plain sort."""

from types import SimpleNamespace

import pytest
import torch
from helpers import make_qkv, rms_ratio

from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import NO_COLUMN
from mtraining_nns.ops.kernels import triton_budgets
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.ring import Ring

pytestmark = pytest.mark.usefixtures("poison")
DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled here")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


def both(
    seq_len, heads, kv_heads, dim, block, last_q, *, layout=None, rank=0, dtype=torch.float32, device="cpu", batch=1
):
    """(columns, sums) by the kernels and by torch for one rank's keys; the ring gathers nothing but the rank's own."""
    layout = layout or Layout(seq_len=seq_len, block=block)
    q, k, *_ = make_qkv(seq_len, heads, kv_heads, dim, batch=batch, dtype=dtype, device=device, seed=seq_len)
    rows = range(max(0, seq_len - last_q), seq_len)
    queries, shard = q[:, rows.start :].contiguous(), layout.shard(k, rank)
    whole = torch.einsum("blnd,bsnd->bnls", queries.float(), k.float().repeat_interleave(heads // kv_heads, 2))
    later = torch.arange(seq_len, device=device) > torch.arange(rows.start, rows.stop, device=device)[:, None]
    lse = torch.logsumexp((whole * dim**-0.5).masked_fill(later, -torch.inf), -1)
    if layout.world == 1:
        ring = Ring.single()
    else:  # the first gather is the log-sum-exp of this rank, the others' make it whole
        ring = SimpleNamespace(rank=rank, world=2, gather=lambda own: [lse])
    place = Place(layout, ring)
    scale = dim**-0.5
    return [
        estimate(queries, shard, rows, place, scale)
        for estimate in (vertical_slash._by_kernels, vertical_slash._by_torch)
    ]


def assert_same(kernels, plain, tolerance):
    for got, expected in zip(kernels, plain, strict=True):
        assert got.shape == expected.shape and got.isfinite().all()
        assert rms_ratio(got, expected, floor=1e-3) < tolerance


@DEVICES
@pytest.mark.parametrize(
    "seq_len,heads,kv_heads,dim,block,last_q",
    [
        (1, 2, 1, 16, 16, 64),
        (63, 2, 1, 16, 16, 64),
        (65, 3, 1, 64, 64, 1),
        (257, 2, 2, 16, 128, 100),
        (1000, 2, 1, 16, 128, 256),
        (1100, 7, 1, 16, 64, 64),
        (1000, 2, 1, 128, 256, 70),
    ],
)
def test_kernels_are_the_torch_estimate(device, seq_len, heads, kv_heads, dim, block, last_q):
    assert_same(
        *both(seq_len, heads, kv_heads, dim, block, last_q, device=device, batch=2 if seq_len == 257 else 1), 1e-5
    )


@DEVICES
def test_half_precision(device):
    """Products of 16-bit numbers are exact in fp32, whatever multiplies them."""
    assert_same(*both(300, 4, 2, 64, 64, 64, dtype=torch.float16, device=device), 1e-5)


@pytest.mark.gpu
def test_bfloat16_at_length():
    assert_same(*both(20000, 16, 2, 128, 128, 64, dtype=torch.bfloat16, device="cuda"), 1e-4)


@DEVICES
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_of_every_layout(device, kind, world):
    layout = Layout(seq_len=300, world=world, kind=kind, block=16, granularity=32)
    for rank in range(world):
        assert_same(*both(300, 2, 1, 16, 16, 64, layout=layout, rank=rank, device=device), 1e-5)


def chosen_plainly(mass, seq_len, config) -> list[int]:
    """Columns of one head by Python's sort: larger mass first, then the earlier key."""
    order = sorted(range(seq_len), key=lambda i: (-mass[i], i))[: min(config.cap, seq_len)]
    kept, reached = [], 0.0
    for rank, i in enumerate(order):
        if config.budget == "fixed":
            if rank >= config.k_v:
                break
        elif config.p_v < 1.0 and reached >= config.p_v * min(config.last_q, seq_len):
            break
        reached += mass[i]
        kept.append(i)
    return sorted(set(kept) | set(range(min(config.sinks, seq_len))))


@pytest.mark.parametrize(
    "settings",
    [
        {"p_v": 0.5},
        {"p_v": 0.9, "cap": 7},
        {"p_v": 1.0},
        {"p_v": 0.7, "cap": 500, "sinks": 0},
        {"budget": "fixed", "k_v": 9},
        {"budget": "fixed", "k_v": 500, "cap": 20, "sinks": 200},
    ],
)
@pytest.mark.parametrize("ties", ["none", "some", "all"])
@pytest.mark.parametrize("by", ["torch", "kernels", "kernels of a ring"])
def test_columns_are_what_a_plain_sort_chooses(settings, ties, by):
    config = AttentionConfig(block=16, **{"last_q": 8, "sinks": 3, **settings})
    mass = torch.rand(2, 3, 100, generator=torch.Generator().manual_seed(1))
    mass = {"none": mass, "some": (mass * 5).round() / 5, "all": torch.ones_like(mass)}[ties]
    mass = mass / mass.sum(-1, keepdim=True) * 8
    place = Place(Layout(seq_len=100, block=16), Ring.single())
    padded = torch.nn.functional.pad(mass, (0, 12), value=-1.0)  # padding is never chosen
    device = "cuda" if by != "torch" and torch.cuda.is_available() else "cpu"
    if by == "torch":
        position, count, capped = vertical_slash._columns(padded, place, config)
    else:
        if by == "kernels of a ring":  # two ranks that hold alternate blocks
            halves = [Layout(seq_len=100, world=2, block=16).positions(rank) for rank in range(2)]
            full = torch.nn.functional.pad(mass, (0, 28), value=-1.0)
            cap = min(config.cap, 100)
            ranks = [vertical_slash._largest(vertical_slash._ranked(full[..., x], x), cap).to(device) for x in halves]
            ring = SimpleNamespace(rank=0, world=2, gather=lambda own: ranks)
            place, padded = Place(Layout(seq_len=100, world=2, block=16), ring), full[..., halves[0]]
        position, count, capped = vertical_slash._columns_by_kernels(
            padded.to(device), place, config, min(config.cap, 100), min(config.sinks, 100)
        )
        expected = vertical_slash._columns(
            torch.nn.functional.pad(mass, (0, 12), value=-1.0),
            Place(Layout(seq_len=100, block=16), Ring.single()),
            config,
        )
        assert capped.item() == expected[2].item()
    for b in range(2):
        for n in range(3):
            expected = chosen_plainly(mass[b, n].tolist(), 100, config)
            assert position[b, n, : count[b, n]].tolist() == expected
            assert (position[b, n, count[b, n] :] == NO_COLUMN).all()


@DEVICES
@pytest.mark.parametrize(
    "settings", [{"p_s": 0.4}, {"p_s": 1.0}, {"budget": "fixed", "k_s": 3}, {"p_s": 0.9, "local": 40}]
)
@pytest.mark.parametrize("ties", [False, True])
def test_slashes_are_what_a_plain_sort_chooses(device, settings, ties):
    config = AttentionConfig(block=16, **{"local": 0, **settings})
    bins = torch.rand(2, 3, 12, generator=torch.Generator().manual_seed(2))
    bins = (bins * 4).round() if ties else bins
    bins[..., 10:] = 0  # blocks of padding
    expected = vertical_slash._slashes(bins, 160, config)
    near = -(-config.local // 16)
    budget = config.k_s if config.budget == "fixed" else None
    bins = bins.to(device)
    kept = triton_budgets.slashes(bins, used=10, share=config.p_s, budget=budget, near=near)
    assert kept.dtype == torch.bool
    for b in range(2):
        for n in range(3):
            order = sorted(range(10), key=lambda i: (-bins[b, n, i].item(), i))
            chosen, reached, total = set(range(near)), 0.0, bins[b, n, :10].double().sum().item()
            for rank, i in enumerate(order):
                if rank >= config.k_s if budget else config.p_s < 1.0 and reached >= config.p_s * total:
                    break
                reached += bins[b, n, i].double().item()
                chosen.add(i)
            assert kept[b, n].nonzero()[:, 0].tolist() == sorted(chosen)
            hit = {0} | chosen | {i + 1 for i in chosen if i < 11}
            assert expected[b, n].nonzero()[:, 0].tolist() == sorted(hit)


@pytest.mark.gpu
def test_building_an_index_waits_for_nothing():
    q, k, *_ = make_qkv(4000, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    place, config = Place(Layout(seq_len=4000), Ring.single()), AttentionConfig()
    vertical_slash.build(q, k, place, config, 0.125)
    torch.cuda.set_sync_debug_mode("error")
    try:
        vertical_slash.build(q, k, place, config, 0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
