"""Balance of a ring: counts against brute force over token pairs, the measures, the cost model, sparsity, live runs."""

from types import SimpleNamespace

import pytest
import torch
from distributed import run_workers
from helpers import index_mask, make_index, operator_of
from test_index import row_index, row_pairs

from mtraining_nns.balance_plots import map_of
from mtraining_nns.generated import Generated
from mtraining_nns.metrics import attention_stats
from mtraining_nns.ops import balance
from mtraining_nns.ops.config import LAYOUTS
from mtraining_nns.ops.cost import Times, predict_ms
from mtraining_nns.ops.index import NO_COLUMN, ColumnIndex, DistanceIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Ring
from mtraining_nns.sparsity import measure_rows, sampled_rows

RINGS = [(1, None), (2, None), (3, None), (4, None), (4, 2), (4, 4), (4, 1), (6, 3)]
PAPER = Times(comp_ms=0.51, intra_ms=0.13, inter_ms=0.98, index_ms=1.13, cpu_ms=2.08)


def without_columns(index: DistanceIndex) -> DistanceIndex:
    return DistanceIndex(hit=index.hit, block=index.block)


def brute_force(index: DistanceIndex, layout: Layout, inner: int | None) -> torch.Tensor:
    """w [W, hops] from the pairs themselves: blocks at the hop that brings their keys, columns at the last one."""
    pairs = index_mask(index, layout.seq_len)
    in_blocks = index_mask(without_columns(index), layout.seq_len)
    width = inner or layout.world
    table = torch.zeros(layout.world, layout.world)
    for rank in range(layout.world):
        mine, hop = real(layout, rank), 0
        for i in range(layout.world // width):
            for j in range(width):
                node, local = divmod(rank, width)
                source = (node - i) % (layout.world // width) * width + (local - j) % width
                table[rank, hop] = in_blocks[:, :, mine][..., real(layout, source)].sum()
                hop += 1
        table[rank, -1] += (pairs & ~in_blocks)[:, :, mine].sum()
    return table.double()


def real(layout: Layout, rank: int) -> torch.Tensor:
    positions = layout.positions(rank)
    return positions[positions < layout.seq_len]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world, inner", RINGS)
@pytest.mark.parametrize("seq_len", [5, 200, 257, 384])
def test_work_is_that_of_every_token_pair(kind, world, inner, seq_len):
    layout = Layout(kind=kind, world=world, seq_len=seq_len, block=16, granularity=32, inner=inner)
    holds = balance.schedule(world, inner)
    both = make_index(seq_len, 3, 16, batch=2, share=0.3, blocks=layout.global_blocks)
    for index in (both, without_columns(both)):
        assert torch.equal(balance.work(index, layout, holds), brute_force(index, layout, inner))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len", [1000, 4096])
def test_the_hops_of_a_rank_are_its_kept_pairs(kind, seq_len):
    layout = Layout(kind=kind, world=4, seq_len=seq_len, block=16, inner=2)
    dense = DistanceIndex.keep_all(1, 3, layout.global_blocks, 16, "cpu")
    for index in (make_index(seq_len, 5, 16, columns=300, blocks=layout.global_blocks), dense):
        for rank in range(4):  # asked for alone, as a live run does
            work = balance.work(index, layout, balance.schedule(4, 2)[rank : rank + 1])
            assert work.sum().item() == index.kept_pairs(layout.block_starts(rank), seq_len).item()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len, span, bits", [(197, 16, False), (197, 48, True), (384, 32, True)])
def test_work_of_a_rank_that_chooses_for_every_row(kind, seq_len, span, bits):
    """4 ranks as 2 x 2, each with its own RowIndex; some rows of it are padding, some spans lie on several ranks."""
    layout = Layout(kind=kind, world=4, seq_len=seq_len, block=16)
    for rank, holds in enumerate(balance.schedule(4, 2)):
        index = row_index(layout, rank, span, bits=bits)
        pairs = row_pairs(index, layout, rank, seq_len)
        expected = [pairs[..., real(layout, source)].sum().item() for source in holds.tolist()]
        assert balance.work(index, layout, holds[None])[0].tolist() == expected
        assert sum(expected) == index.kept_pairs(layout.block_starts(rank), seq_len).item()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len, span, bits", [(197, 16, False), (197, 48, True)])
def test_rows_of_a_whole_sequence_tell_the_work_of_every_rank(kind, seq_len, span, bits):
    whole, layout = Layout(seq_len=seq_len, block=16), Layout(kind=kind, world=4, seq_len=seq_len, block=16)
    index = row_index(whole, 0, span, bits=bits)
    pairs = row_pairs(index, whole, 0, seq_len)[..., :seq_len, :]
    holds = balance.schedule(4, 2)
    owner = torch.empty(seq_len, dtype=torch.long)
    for rank in range(4):
        owner[real(layout, rank)] = rank
    expected = [[pairs[..., owner == r, :][..., owner == s].sum().item() for s in holds[r].tolist()] for r in range(4)]
    assert balance.work(index, layout, holds).tolist() == expected


@pytest.mark.parametrize("world, inner", RINGS)
def test_every_rank_meets_every_key_once_and_its_own_first(world, inner):
    holds = balance.schedule(world, inner)
    assert torch.equal(holds.sort(1).values, torch.arange(world).expand(world, world))
    assert torch.equal(holds[:, 0], torch.arange(world))


def test_the_order_of_two_levels():
    """2 nodes of 2; rank 0's line is the one in ops/hops.py."""
    assert balance.schedule(4, 2).tolist() == [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]
    assert balance.schedule(4).tolist() == [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]


def table(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_measures_of_small_tables():
    assert balance.measure(table([2, 2], [2, 2])) == (1, 1, 1)
    assert balance.measure(table([3, 1], [1, 1])) == pytest.approx((4 / 3, (1.5 + 1) / 2, 4 / 3))
    # each rank has as much, at other times: the ring waits at every hop
    assert balance.measure(table([4, 0], [0, 4])) == pytest.approx((1, 2, 2))


def test_layers_follow_one_another():
    """The busy rank of one layer does not make up for the idle one of the next."""
    layers = torch.stack([table([3, 3], [1, 1]), table([1, 1], [3, 3])])
    assert balance.measure(layers) == pytest.approx((1.5, 1, 1.5))


def test_a_rank_without_tokens_has_no_steps():
    assert balance.measure(table([3, 1], [0, 0])) == pytest.approx((2, 1.5, 2))


def measures(index, kind, world, inner=None, seq_len=8192) -> balance.Balance:
    layout = Layout(kind=kind, world=world, seq_len=seq_len, block=index.block)
    return balance.measure(balance.work(index, layout, balance.schedule(world, inner)))


def test_dense_attention_balances_as_theory_says():
    """n blocks of b tokens in S tokens on W ranks."""
    world, blocks, block, length = 8, 512, 16, 8192
    index = DistanceIndex.keep_all(1, 1, blocks, block, "cpu")
    whole = length * (length + 1) / 2
    # zigzag: chunk r and its mirror, from the start and from the end, make the same area on every rank
    assert measures(index, "zigzag", world).worker == 1
    # striped: each stripe of the last rank sees W - 1 stripes more than that of the first
    last = sum((block * i * block + block * (block + 1) / 2) for i in range(world - 1, blocks, world))
    assert measures(index, "striped", world).worker == pytest.approx(last * world / whole, rel=1e-12)
    assert measures(index, "striped", world).critical < 1.02
    # contiguous: the last rank sees (2 W - 1) / W^2 of the triangle
    found = measures(index, "contiguous", world)
    assert found.worker == pytest.approx((2 * world - 1) / world, rel=2e-3) and found.critical > 1.8


def test_columns_crowded_in_the_first_quarter():
    """Stripes share them evenly in whatever order keys travel. Of 8 contiguous parts the first two see 1/4 and 3/4."""
    g = torch.Generator().manual_seed(0)
    position = torch.stack([torch.randperm(2048, generator=g)[:300].sort().values for _ in range(4)])[None].int()
    hit = torch.zeros(1, 4, 512, dtype=torch.bool)
    hit[..., :3] = True
    count = torch.full((1, 4), 300, dtype=torch.int32)
    columns = ColumnIndex(position=position, count=count, hit=hit, block=16)
    index = DistanceIndex(hit=hit, block=16, columns=columns)
    for inner in (None, 4):
        found = measures(index, "striped", 8, inner)
        assert 1 < found.worker < 1.2
        assert found.step > 4  # nearly all work is columns, and they are computed at the last of 8 hops
    columns_only = 8 / (0.25 + 0.75 + 6)
    assert measures(index, "contiguous", 8).worker == pytest.approx(columns_only, rel=0.05)


@pytest.mark.parametrize("world, inner", [(16, 4), (32, 8), (128, 8)])
def test_stripes_that_turn_within_nodes_are_even_at_each_hop_of_two_levels(world, inner):
    index, holds = Generated().index(), balance.schedule(world, inner)
    plain, turning = (
        balance.measure(balance.work(index, Layout(seq_len=524288, world=world, inner=turn), holds))
        for turn in (None, inner)
    )
    assert turning.worker < 1.03 and turning.critical < 1.15
    assert turning.critical - 1 < 0.45 * (plain.critical - 1)


def test_slashes_alone_are_even_on_stripes_and_uneven_at_each_hop_of_zigzag():
    index = without_columns(Generated(seq_len=65536, heads=4, local=256, block=16, seed=3).index())
    zigzag, striped = (measures(index, kind, 16, seq_len=65536) for kind in ("zigzag", "striped"))
    assert striped.critical < 1.05 < 1.3 < zigzag.critical


def test_the_papers_table_4():
    """Also the saving that the paper states, and one link that is slower than a whole node's computation."""
    even = torch.ones(32, 32)
    flat, levels = predict_ms(PAPER, even), predict_ms(PAPER, even, inner=8)
    assert flat == pytest.approx(34.10, abs=5e-3) and levels == pytest.approx(19.53, abs=5e-3)
    assert 1 - levels / flat == pytest.approx(0.427, abs=5e-4)
    slow = Times(comp_ms=1, intra_ms=0, inter_ms=10)
    assert predict_ms(slow, even, inner=8) == pytest.approx(3 * 10 + 8)


def test_a_hop_lasts_as_long_as_its_busiest_rank():
    free = Times(comp_ms=1, intra_ms=0, inter_ms=0)
    uneven = table([4, 0], [0, 4])
    assert predict_ms(free, uneven) == pytest.approx(4)  # 2 hops of 2 ms: the mean of w is 2
    assert predict_ms(free, uneven) == pytest.approx(2 * balance.measure(uneven).critical)
    assert predict_ms(free, torch.stack([uneven, torch.ones(2, 2)])) == pytest.approx((4 + 2) / 2)


def test_sending_hides_behind_the_busiest_rank_only():
    times = Times(comp_ms=1, intra_ms=1.5, inter_ms=1.5)
    assert predict_ms(times, table([3, 1], [3, 1])) == pytest.approx(1.5 + 0.5)  # the last hop sends nothing
    assert predict_ms(times, table([1, 3], [1, 3])) == pytest.approx(1.5 + 1.5)
    assert predict_ms(times, table([1, 3], [1, 3]), inner=2) == pytest.approx(1.5 + 1.5)


def test_generated_keeps_what_its_options_say():
    options = Generated(seq_len=5000, heads=3, block=16, sinks=5, local=40, bands=2, band_width=20, columns=7)
    index = options.index()
    assert torch.equal(index.hit, options.index().hit) and index.hit[..., :4].all()
    assert (index.columns.count == 12).all() and index.columns.position.shape[-1] == 12
    assert (index.columns.position[..., :5] == torch.arange(5)).all()
    assert (index.columns.position.diff(dim=-1) > 0).all() and index.columns.position.max() < 5000
    diagonals = index.hit[0].sum(-1)  # the band's 4, and 2 bands of 20 distances, each on 3 or 4 diagonals
    assert (diagonals > 4).all() and (diagonals <= 12).all()
    assert not torch.equal(index.hit[0, 0], index.hit[0, 1])
    other = Generated(**{**vars(options), "seed": 1}).index()
    assert not torch.equal(index.columns.position, other.columns.position)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_sparsity_of_the_scores_gradient_is_autograds(scale):
    """A and dL/dS of explicit attention, and the shares by counting in a loop."""
    g = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 50, 4, 8, generator=g) for _ in range(2))
    k, v = (torch.randn(2, 50, 2, 8, generator=g) for _ in range(2))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k.repeat_interleave(2, 2)) * (scale or 8**-0.5)
    scores = scores.masked_fill(torch.ones(50, 50, dtype=torch.bool).triu(1), -torch.inf).requires_grad_()
    weights = scores.softmax(-1)
    torch.einsum("bnqk,bknd->bqnd", weights, v.repeat_interleave(2, 2)).backward(dout)
    rows = [3, 20, 48]
    expected = torch.tensor(
        [shares(weights[b, n, row].detach(), scores.grad[b, n, row].abs(), row) for b, n, row in cells(rows)]
    )
    found = measure_rows(q, k, v, dout, rows, scale=scale)
    assert torch.tensor(found) == pytest.approx(expected.mean(0), rel=1e-5)


def cells(rows):
    return [(b, n, row) for b in range(2) for n in range(4) for row in rows]


def shares(weights, gradients, row) -> tuple[float, float, float]:
    chosen, of_gradients = heaviest(weights), heaviest(gradients)
    inherited = sum(gradients[key] for key in chosen) / gradients.sum()
    return len(chosen) / (row + 1), len(of_gradients) / (row + 1), inherited.item()


def heaviest(mass) -> list[int]:
    kept, held = [], 0.0
    for key in mass.argsort(descending=True).tolist():
        kept.append(key)
        held += mass[key].item()
        if held >= 0.95 * mass.sum().item():
            return kept


def test_sampled_rows_lie_in_the_second_half():
    assert sampled_rows(64, 4) == [39, 47, 55, 62]
    assert sampled_rows(9, 100) == [4, 5, 6, 7]
    assert sampled_rows(4, 1) == [2]


def test_maps_show_the_rank_of_the_query_and_the_hop_of_the_key():
    rank, hop = map_of("striped", 2, None)
    assert rank[:, 0].tolist() == [0, 1] * 4
    assert hop[3, :4].tolist() == [1, 0, 1, 0] and hop[3, 4:].isnan().all()


def live(rank: int, world: int):
    """Scalars of a ring of 4, and what the whole table says about the same two layers."""
    from datetime import timedelta

    import torch.distributed as dist

    ring = Ring.create(4, timedelta(seconds=60), inner=2)
    layout = Layout(kind="contiguous", world=4, seq_len=500, block=16)
    indices = [make_index(500, 3, 16, blocks=layout.global_blocks, seed=seed) for seed in range(2)]
    operator = operator_of(indices[0], ring, layout="contiguous")
    operator.last = dict(enumerate((index, layout) for index in indices))

    class World:
        device = torch.device("cpu")

        @staticmethod
        def max(x):
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            return x

    World.ring = ring
    tables = [balance.work(index, layout, balance.schedule(4, 2)) for index in indices]
    total = sum(table.sum(1) for table in tables)
    return attention_stats(operator, World), balance.measure(torch.stack(tables)), (total.max() / total.mean()).item()


def test_a_live_run_logs_the_same_numbers():
    for values, expected, work in run_workers(live, 4):
        found = [values[f"attention/balance_{name}"] for name in balance.Balance._fields]
        assert found == pytest.approx(expected, rel=1e-12)
        assert values["attention/work_max_over_mean"] == pytest.approx(work, rel=1e-12)


def test_a_form_of_index_that_is_not_counted_has_no_balance(monkeypatch):
    index, layout = make_index(100, 2, 16), Layout(seq_len=100, block=16)
    operator = operator_of(index)
    operator.last = {0: (index, layout)}
    world = SimpleNamespace(device=torch.device("cpu"), ring=Ring.single(), max=lambda x: x)
    assert attention_stats(operator, world)["attention/balance_critical"] == 1
    monkeypatch.delitem(balance.PAIRS_BY_KEY, DistanceIndex)
    values = attention_stats(operator, world)
    assert values["attention/work_max_over_mean"] == 1 and not any("balance" in tag for tag in values)


def test_entries_past_the_count_are_no_columns():
    index = make_index(300, 2, 16, columns=5)
    assert (index.columns.position == NO_COLUMN).any()
    layout = Layout(seq_len=300, block=16)
    work = balance.work(index, layout, balance.schedule(1))
    assert work.item() == index_mask(index, 300).sum().item()
