"""The ring equals one device: same index, same out, dq, dk, dv, on every layout, for every world.

One set of processes a world runs all its cases. Padding holds rubbish, as the padded tokens of a real model do.
"""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from distributed import run_workers
from helpers import assert_close, index_mask, make_qkv, poisoned, reference, rms, rms_ratio, with_grads

from mtraining_nns.ops import passes
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import LAYOUTS, AttentionConfig
from mtraining_nns.ops.kernels import Traits
from mtraining_nns.ops.kernels import torch as torch_kernels
from mtraining_nns.ops.reference import causal_mask
from mtraining_nns.ops.ring import Exchange, Ring, Swap

RESULTS = ("out", "dq", "dk", "dv")
TOP_P = {"p_v": 0.5, "p_s": 0.35, "last_q": 24, "sinks": 3, "local": 16}
KEEP_ALL = ({"p_v": 1.0, "p_s": 1.0}, {"budget": "fixed", "k_v": 1000, "k_s": 1000, "local": 0})
FIXED = {"budget": "fixed", "k_v": 12, "k_s": 2, "last_q": 40, "sinks": 0, "local": 0, "cap": 9}


@dataclass(frozen=True)
class Case:
    seq_len: int
    settings: dict = field(default_factory=dict)
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.float32
    batch: int = 1
    last_only: int = 0  # dout is zero but on this many last tokens
    constant: bool = False  # all rows alike: exact ties everywhere

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(**{"block": 16, **self.settings})

    def inputs(self):
        q, k, v, dout = make_qkv(self.seq_len, *self.heads, batch=self.batch, dtype=self.dtype)
        if self.last_only:
            dout[:, : -self.last_only] = 0
        if self.constant:
            q, k = q[:, :1].expand_as(q), k[:, :1].expand_as(k)
        return q, k, v, dout


def combinations(seq_len: int) -> list[Case]:
    layouts = [{"layout": kind} for kind in LAYOUTS] + [{"layout": "striped", "granularity": 32}]
    patterns = [{"pattern": "dense"}, TOP_P, FIXED]
    return [Case(seq_len, {**layout, **pattern}) for layout in layouts for pattern in patterns]


def run_cases(rank: int, world: int, cases: list[Case], chunks=passes.CHUNKS, apart=False, front=0, **levels):
    """One dict a case. chunks: of heads; apart: the kernels take own keys alone; front: rows that they want free."""
    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    passes.CHUNKS, passes.CHUNK_ROWS, torch_kernels.TRAITS = chunks, 1, Traits(own_with_others=not apart)
    torch_kernels.front_rows = lambda size, *, backward: front * (1 + backward)
    ring = Ring.create(world, **levels)
    return [run_case(case, ring) for case in cases]


def run_case(case: Case, ring: Ring) -> dict:
    op = Operator(case.config, ring, "cpu")
    layout = op.layout(case.seq_len)
    *qkv, dout = case.inputs()
    local = [layout.shard(x, ring.rank, pad_value=9.0) for x in qkv] + [layout.shard(dout, ring.rank)]
    got = with_grads(lambda q, k, v: op(q, k, v, seq_len=case.seq_len), *local)
    assert all(x.dtype == case.dtype and x.isfinite().all() for x in got.values())
    padding = layout.positions(ring.rank) >= case.seq_len
    assert not any(got[name][:, padding].any() for name in ("dq", "dk", "dv")), "padding has gradients"
    return {**got, "index": op.last[0][0], "layout": layout, "stats": op.read_stats(), "store": op.store.pending}


def unsharded(parts: list[dict]) -> dict:
    layout = parts[0]["layout"]
    return {name: layout.unshard([part[name] for part in parts]) for name in RESULTS}


def check_index(case: Case, parts: list[dict], index) -> None:
    """Equal on all ranks, and to the index of one rank; a longer padding only adds blocks."""
    blocks = -(-case.seq_len // case.config.block)
    for part in parts:
        assert not any(part["store"].values())
        assert torch.equal(part["index"].hit, parts[0]["index"].hit)
        # bins that tie exactly differ in their last bit with the number of ranks that are summed
        assert case.constant or torch.equal(part["index"].hit[..., :blocks], index.hit[..., :blocks])
        if index.columns is not None:
            width = int(index.columns.count.max())
            assert torch.equal(part["index"].columns.count, index.columns.count)
            assert torch.equal(part["index"].columns.position[..., :width], index.columns.position[..., :width])
            assert part["index"].capped == index.capped


def check_case(case: Case, parts: list[dict]) -> None:
    inputs = case.inputs()
    single = Operator(case.config, Ring.single(), "cpu")
    single(*inputs[:3])
    check_index(case, parts, single.last[0][0])
    mask = index_mask(parts[0]["index"], case.seq_len)
    if case.settings in KEEP_ALL or case.settings.get("pattern") == "dense":
        assert torch.equal(mask, causal_mask(case.seq_len).expand_as(mask))
    elif case.seq_len > 100:
        assert mask.float().mean() < 0.45, "nearly dense: the case tests too little"
    ref = reference(*inputs, mask)
    del ref["lse"]
    # keys that are all alike leave dq exactly zero
    assert_close(unsharded(parts), ref, 1e-5, floor=rms(inputs[3]) if case.constant else 0.0)
    assert sum(part["stats"]["work"][0] for part in parts) == mask.sum()
    density = mask.sum().item() / (mask[..., 0].numel() * (case.seq_len + 1) / 2)
    assert all(part["stats"]["density"][0] == pytest.approx(density, rel=1e-9) for part in parts)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_ring_is_one_device(world):
    """Two stripes of 32 a rank and a ragged third; a batch; one kv group; constant rows; gradients from afar."""
    check_ring(world)


@pytest.mark.parametrize(("chunks", "apart", "front"), [(1, False, 0), (2, True, 0), (4, False, 5)])
def test_gathered_hops_of_all_heads_and_of_some(chunks, apart, front):
    check_ring(4, mode="gather", chunks=chunks, apart=apart, front=front)


LEVELS = [(2, 2), (2, 3), (3, 2), (3, 1)]


@pytest.mark.parametrize("mode", ["ring", "gather"])
@pytest.mark.parametrize(("nodes", "inner"), LEVELS)
def test_hierarchical_ring_is_one_device(nodes, inner, mode):
    check_ring(nodes * inner, inner=inner, mode=mode)


def test_nodes_with_heads_treated_at_once():
    """Then the keys of other nodes come first in a backward pass."""
    check_ring(6, inner=2, mode="gather", chunks=1)


def check_ring(world: int, **levels) -> None:
    seq_len = 64 * world + 27
    cases = combinations(seq_len)
    cases += [Case(seq_len, TOP_P, heads, batch=2) for heads in ((4, 2), (6, 3))]
    cases += [Case(seq_len, TOP_P, (6, 1)), Case(seq_len, FIXED, constant=True)]
    cases += [Case(64 * world, {"layout": kind, **FIXED}, last_only=16) for kind in LAYOUTS]
    cases += [Case(seq_len, keep) for keep in KEEP_ALL]
    results = run_workers(partial(run_cases, **levels), world, cases)
    for i, case in enumerate(cases):
        parts = [result[i] for result in results]
        try:
            check_case(case, parts)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        if case.last_only and case.settings["layout"] == "contiguous":
            assert all(rms(parts[0][name]) > 1e-4 for name in ("dk", "dv")), "nothing came home to rank 0"


@pytest.mark.parametrize(("seq_len", "world", "block"), [(2999, 4, 64), (10, 3, 16), (8423, 8, 64), (2, 3, 16)])
def test_any_length_on_any_world(seq_len, world, block):
    """Also ranks that hold nothing but padding. Long ones are compared with one rank, which the reference covers."""
    few = {"block": block, "budget": "fixed", "k_v": 30, "k_s": 3, "local": 64, "last_q": 64}
    cases = [Case(seq_len, {**few, "layout": kind}, (2, 1)) for kind in LAYOUTS]
    results = run_workers(run_cases, world, cases)
    for i, case in enumerate(cases):
        single = Operator(case.config, Ring.single(), "cpu")
        expected = with_grads(single, *case.inputs())
        parts = [result[i] for result in results]
        check_index(case, parts, single.last[0][0])
        assert_close(unsharded(parts), expected, 1e-5)


def test_error_does_not_grow_with_the_ring():
    """Accumulators are fp32: rounding at each hop would show at world 8."""
    cases = [Case(600, {"pattern": "dense"}, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    cases.append(Case(600, TOP_P, dtype=torch.bfloat16))
    errors = {world: low_precision_errors(cases, run_workers(run_cases, world, cases)) for world in (2, 8)}
    for case, two, eight in zip(cases, errors[2], errors[8]):
        for name in RESULTS:
            assert two[name] < 5e-3, (case, name)
            assert eight[name] < 1.5 * two[name], (case, name, two[name], eight[name])


def low_precision_errors(cases: list[Case], results: list[list[dict]]) -> list[dict]:
    errors = []
    for i, case in enumerate(cases):
        parts = [result[i] for result in results]
        ref = reference(*case.inputs(), index_mask(parts[0]["index"], case.seq_len))
        errors.append({name: rms_ratio(x, ref[name]) for name, x in unsharded(parts).items()})
    return errors


def run_checkpointed(rank: int, world: int) -> None:
    """Checkpointing on a ring: a rank that broke a tie another way would hang the others or change the gradients."""
    from test_store import Layers, grads

    case = Case(64 * world + 5, {**FIXED, "layout": "striped"})
    ring = Ring.create(world)
    results, builds = [], []
    for checkpointing in ({}, {"use_reentrant": False}):
        op = Operator(case.config, ring, "cpu")
        layout = op.layout(case.seq_len)
        pattern = op._pattern(0, layout)
        built = []
        op._pattern = lambda *args, p=pattern, b=built: (b.append(args), p)[1]
        model = Layers(lambda q, k, v, layer, op=op: op(q, k, v, layer=layer, seq_len=case.seq_len), **checkpointing)
        g = torch.Generator().manual_seed(1)
        x = torch.randn(1, 1, 32, generator=g).expand(-1, layout.local_len, -1)  # constant rows
        weight = layout.shard(torch.randn(1, case.seq_len, 32, generator=g), rank)
        results.append(grads(model, (model(x) * weight).sum()))
        builds.append(len(built))
        assert not any(op.store.pending.values())
    assert builds == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert all(x.abs().max() > 0 for x in results[0])


def test_checkpointing_with_exact_ties_on_four_ranks():
    run_workers(run_checkpointed, 4)


def run_rings(rank: int, world: int) -> dict:
    """World 4 as two rings of 2, each with its own sequence."""
    with pytest.raises(ValueError, match="rings of 3 ranks need a multiple of 3 processes, got 4"):
        Ring.create(3)
    assert Ring.create(1) == Ring.single()
    ring = Ring.create(2)
    assert ring.ranks == ((0, 1) if rank < 2 else (2, 3)) and ring.rank == rank % 2 and ring.world == 2
    assert ring.sum(torch.tensor([rank])).item() == sum(ring.ranks)
    assert [x.item() for x in ring.gather(torch.tensor([rank]))] == list(ring.ranks)
    whole = Ring.create(4)
    assert [whole.source(0, step) for step in range(4)] == [(rank - step) % 4 for step in range(4)]
    sent, received = torch.full((3,), float(rank)), torch.zeros(3)
    exchange = Exchange(whole, "numbers")
    for _ in range(3):  # after three hops a rank holds what its successor sent
        exchange.start(Swap(sent, received))
        exchange.wait()
        sent, received = received.clone(), sent
    assert sent.tolist() == [float((rank - 3) % 4)] * 3
    case = Case(200 + 40 * (rank // 2), TOP_P)
    return run_case(case, ring)


def test_two_rings_side_by_side():
    results = run_workers(run_rings, 4)
    for first in (0, 2):
        check_case(Case(200 + 20 * first, TOP_P), results[first : first + 2])


def run_exchanges(rank: int, world: int) -> int:
    """300 exchanges under way in pairs, each of another length."""
    ring, wrong = Ring.create(world), 0
    for turn in range(150):
        pair = [Exchange(ring, f"turn {turn}") for _ in range(2)]
        arrived = [torch.zeros(1 + turn % 7 + 1000 * i) for i in range(2)]
        for i, exchange in enumerate(pair):
            exchange.start(Swap(torch.full_like(arrived[i], float(rank + 10 * i)), arrived[i]))
        for i, exchange in enumerate(pair):
            exchange.wait()
            wrong += bool((arrived[i] != (rank - 1) % world + 10 * i).any())
    return wrong


@pytest.mark.parametrize("world", [2, 3, 5])
def test_many_exchanges(world):
    assert run_workers(run_exchanges, world) == [0] * world
