"""The estimate's kernels against its plain torch, and the choice of columns and slashes against a plain sort.

The interpreter takes milliseconds a tile, so lengths are short on the CPU; the same checks run compiled on a GPU.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import index_mask, make_qkv, never_waiting, rms_ratio
from kernel_cases import ON_DEVICES, compiled

from mtraining_nns.ops.config import LAYOUTS, AttentionConfig
from mtraining_nns.ops.index import NO_COLUMN
from mtraining_nns.ops.kernels import triton_budgets, triton_estimate
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.ring import Ring

pytestmark = pytest.mark.usefixtures("poison")
FP16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    seq_len: int
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    block: int = 16
    last_q: int = 64
    dtype: torch.dtype = torch.float32
    batch: int = 1
    scale: float | None = None

    def inputs(self, device):
        """(last queries, k)."""
        q, k, *_ = make_qkv(
            self.seq_len, self.heads, self.kv_heads, self.dim, batch=self.batch, dtype=self.dtype, device=device
        )
        return q[:, -min(self.last_q, self.seq_len) :].contiguous(), k


def estimate(passes, case: Case, layout: Layout, device) -> list[dict[str, torch.Tensor]]:
    """What each rank's two passes give, the second with the log-sum-exp of all ranks."""
    queries, k = case.inputs(device)
    scale = case.scale or case.dim**-0.5
    places = [Place(layout, Ring(rank=rank, ranks=tuple(range(layout.world)))) for rank in range(layout.world)]
    shards = [k] if layout.world == 1 else [layout.shard(k, place.ring.rank, pad_value=9.0) for place in places]
    lse = [passes.local_lse(queries, shard, place, scale) for shard, place in zip(shards, places)]
    whole = torch.logsumexp(torch.stack(lse), 0)
    found = []
    for shard, place, own in zip(shards, places, lse):
        columns, bins = passes.pooled_weights(queries, shard, whole, place, scale)
        found.append({"lse": own, "columns": columns, "bins": bins})
    return found


def check(case: Case, device, layout: Layout | None = None, tolerance: float = 1e-5) -> None:
    layout = layout or Layout(seq_len=case.seq_len, block=case.block)
    for got, expected in zip(*(estimate(passes, case, layout, device) for passes in (triton_estimate, vertical_slash))):
        seen = expected["lse"].isfinite()
        assert torch.equal(got["lse"] == -torch.inf, ~seen), "other queries see nothing"
        assert not seen.any() or rms_ratio(got["lse"][seen], expected["lse"][seen], 1e-3) < tolerance
        for name in ("columns", "bins"):
            assert got[name].dtype == torch.float32 and got[name].is_contiguous()
            assert rms_ratio(got[name], expected[name], 1e-3) < tolerance, name
        assert torch.equal(got["columns"] == -1, expected["columns"] == -1), "padding is marked"


# head dims and ratios; lengths; numbers of queries, within a block, across blocks and beyond the sequence; blocks
# smaller and larger than a tile of keys, which is 32 for fp32 and 128 else
CASES = [Case(65, 3, 3, dim, dtype=dtype) for dim in (16, 64, 128) for dtype in (torch.float32, FP16)]
CASES += [Case(65, heads, kv_heads, batch=2) for heads, kv_heads in ((1, 1), (6, 2), (7, 1))]
CASES += [Case(seq_len, block=block) for seq_len in (1, 63, 257) for block in (16, 128)]
CASES += [Case(1000, 3, 1, 64, 64, 64, FP16), Case(1000, 2, 1, 16, 128, 100, FP16)]
CASES += [Case(300, 2, 1, 16, block, last_q) for block in (16, 64, 128) for last_q in (1, 64, 100, 256)]
CASES += [Case(300, 2, 1, 16, block, last_q, FP16) for block in (16, 64, 128, 256) for last_q in (1, 100)]
CASES += [Case(65, 2, 1, 256, 64, 64, FP16), Case(65, 2, 1, 32, scale=0.7), Case(100, block=512, last_q=256)]


@ON_DEVICES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_plain_torch(case, device):
    check(case, device)


@ON_DEVICES
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3])
def test_kernels_are_plain_torch_on_every_rank(kind, world, device):
    """Also ranks that hold padding, nothing else, or none of the last queries' keys."""
    for seq_len, block in ((2, 16), (233, 16), (233, 64)):
        granularity = 2 * block if kind == "striped" and seq_len > 100 else None
        check(
            Case(seq_len, block=block),
            device,
            Layout(seq_len=seq_len, world=world, kind=kind, block=block, granularity=granularity),
        )


@ON_DEVICES
def test_ranks_add_up_to_one_device(device):
    case = Case(300, 4, 2, block=16, last_q=40)
    whole = estimate(triton_estimate, case, Layout(seq_len=300, block=16), device)[0]
    layout = Layout(seq_len=300, world=3, block=16, granularity=32)
    parts = estimate(triton_estimate, case, layout, device)
    bins = torch.stack([part["bins"] for part in parts]).sum(0)
    assert rms_ratio(bins[..., : whole["bins"].shape[-1]], whole["bins"]) < 1e-6
    assert rms_ratio(layout.unshard([part["columns"] for part in parts], 2), whole["columns"]) < 1e-6
    assert rms_ratio(bins.sum(-1), torch.full((1, 4), 40.0)) < 1e-6


@ON_DEVICES
def test_k_of_any_strides(device):
    case = Case(100, 2, 2)
    queries, k = case.inputs(device)
    place = Place(Layout(seq_len=100, block=16), Ring.single())
    other = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert not other.is_contiguous()
    expected = triton_estimate.local_lse(queries, k, place, 0.25)
    assert torch.equal(triton_estimate.local_lse(queries, other, place, 0.25), expected)


@compiled
def test_the_index_by_kernels_is_the_index(monkeypatch):
    """The whole build on kernels, as a GPU does it."""
    config = AttentionConfig(block=16, last_q=24, p_v=0.5, p_s=0.4, sinks=3, local=16)
    place = Place(Layout(seq_len=200, block=16), Ring.single())
    q, k, *_ = make_qkv(200, batch=2)
    expected = vertical_slash.build(q, k, place, config, 0.3)
    passes = triton_estimate.local_lse, triton_estimate.pooled_weights
    monkeypatch.setattr(vertical_slash, "_passes", lambda k: passes)
    assert torch.equal(index_mask(vertical_slash.build(q, k, place, config, 0.3), 200), index_mask(expected, 200))


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


@ON_DEVICES
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


def in_plain_torch(q, k, place, config, scale, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(vertical_slash, "_passes", lambda k: (vertical_slash.local_lse, vertical_slash.pooled_weights))
        return vertical_slash.build(q, k, place, config, scale), vertical_slash.masses(q, k, place, config, scale)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 2, 128), (28, 4, 128), (9, 3, 64), (4, 4, 256)])
@pytest.mark.parametrize("block", [64, 128])
def test_long_sequences_on_a_gpu(heads, kv_heads, dim, block, monkeypatch):
    for seq_len, last_q in ((8192, 64), (8000, 256)):
        q, k, *_ = make_qkv(seq_len, heads, kv_heads, dim, dtype=BF16, device="cuda")
        place, config = Place(Layout(seq_len=seq_len, block=block), Ring.single()), AttentionConfig(block=block)
        for settings in (config, replace(config, budget="fixed", k_v=500, k_s=9)):
            settings = replace(settings, last_q=last_q)
            expected, plain = in_plain_torch(q, k, place, settings, dim**-0.5, monkeypatch)
            for got, mass in zip(vertical_slash.masses(q, k, place, settings, dim**-0.5), plain):
                assert rms_ratio(got, mass) < 1e-4
            got = vertical_slash.build(q, k, place, settings, dim**-0.5)
            assert (got.hit == expected.hit).float().mean() > 0.999
            pairs = zip(*(x.columns.position.flatten(0, 1).tolist() for x in (got, expected)))
            same = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in pairs]
            assert min(same) > 0.98 and sum(same) / len(same) > 0.995
            again = vertical_slash.build(q, k, place, settings, dim**-0.5)
            assert torch.equal(got.hit, again.hit) and torch.equal(got.columns.position, again.columns.position)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    q, k, *_ = make_qkv(5000, 8, 2, 128, dtype=BF16, device="cuda")
    place = Place(Layout(seq_len=5000), Ring.single())
    configs = [AttentionConfig(), AttentionConfig(p_v=1.0, p_s=1.0), AttentionConfig(budget="fixed", cap=7000)]
    for config in configs:
        vertical_slash.build(q, k, place, config, 0.1)  # compiles kernels, copies the layout's tables
    with never_waiting():
        for config in configs:
            vertical_slash.build(q, k, place, config, 0.1)


@pytest.mark.gpu
def test_512k_tokens_of_28_heads_take_less_than_a_gigabyte():
    g = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(1, 524288, n, 128, device="cuda", dtype=BF16, generator=g) for n in (28, 4))
    place = Place(Layout(seq_len=524288), Ring.single())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index = vertical_slash.build(q, k, place, AttentionConfig(), 128**-0.5)
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
    assert (index.columns.count >= 64).all() and index.hit[..., 0].all()


DIVERGED = {"a key": (slice(None), 40), "its last queries": None, "everything": (slice(None), slice(None))}


@ON_DEVICES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", DIVERGED)
@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_lists_of_a_diverged_run_stay_lists(device, where, bad, by):
    case, config = Case(200), AttentionConfig(block=16, cap=20, sinks=3, last_q=64, p_v=0.9)
    queries, k = case.inputs(device)
    (queries if DIVERGED[where] is None else k)[DIVERGED[where] or slice(None)] = bad
    place = Place(Layout(seq_len=200, block=16), Ring.single())
    passes = triton_estimate if by == "kernels" else vertical_slash
    lse = passes.local_lse(queries, k, place, 0.25)
    mass, bins = passes.pooled_weights(queries, k, lse, place, 0.25)
    assert mass.isfinite().all()
    hit = triton_budgets.slashes(bins, used=13, share=0.9, budget=None, near=2)
    assert hit[..., :2].all()
    choose = vertical_slash._columns if by == "torch" else partial(vertical_slash._columns_by_kernels, cap=20, sinks=3)
    check_lists(*choose(mass, place, config)[:2], width=23)


@ON_DEVICES
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_columns_never_leave_their_list(device, share, bad):
    g = torch.Generator().manual_seed(3)
    mass = torch.rand(2, 3, 5000, generator=g)
    mass[torch.rand(mass.shape, generator=g) < share] = bad
    mass = mass.to(device)
    best = mass.topk(64, sorted=False).values
    position, count, _ = triton_budgets.columns(mass, best, None, wanted=60.0, most=64, sinks=4, width=68)
    check_lists(position, count, width=68)


def check_lists(position, count, *, width: int) -> None:
    assert position.shape[-1] == width and (count <= width).all()
    for row, length in zip(position.flatten(0, 1).tolist(), count.flatten().tolist()):
        assert row[:length] == sorted(set(row[:length])) and set(row[length:]) <= {NO_COLUMN}
