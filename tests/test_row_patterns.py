"""Patterns whose ranks keep an index of their own, XAttention and MoBA: rings, checkpointing, backends, statistics.

`test_xattention.py` and `test_moba.py` prove the index of one rank; here many ranks must keep the same pairs, and give
the same out, dq, dk and dv. One set of processes a ring runs all its cases. Padding holds rubbish.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from distributed import run_workers
from helpers import assert_close, block_mask, make_qkv, never_waiting, reference, rms_ratio, with_grads
from kernel_cases import Case as KernelCase
from kernel_cases import both
from test_ring import RESULTS, Case, run_cases
from test_store import Layers, assert_same_bits, grads, inputs, is_empty

from mtraining_nns.ops import kernels
from mtraining_nns.ops.attention import PATTERNS, Operator
from mtraining_nns.ops.config import LAYOUTS, AttentionConfig
from mtraining_nns.ops.kernels import triton_lists
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.lists import block_lists
from mtraining_nns.ops.patterns import Place
from mtraining_nns.ops.ring import Ring

FEW = {
    "xattention": {"pattern": "xattention", "stride": 4, "threshold": 0.5},
    "moba": {"pattern": "moba", "chunk": 48, "top_k": 2},
    "flexprefill": {"pattern": "flexprefill", "threshold": 0.4, "tau": 0.45, "sinks": 0, "local": 0},
}
KEEP_ALL = {"xattention": {"threshold": 1.0}, "moba": {"top_k": 100}, "flexprefill": {"threshold": 1.0}}
ON_PATTERNS = pytest.mark.parametrize("pattern", FEW)


def combinations(world: int) -> list[Case]:
    """A ragged last stripe; chunks of MoBA that lie on two ranks and more; ranks of nothing but padding."""
    seq_len = 64 * world + 27
    layouts = [{"layout": kind} for kind in LAYOUTS] + [{"layout": "striped", "granularity": 32}]
    cases = []
    for name, few in FEW.items():
        cases += [Case(seq_len, {**layout, **few}) for layout in layouts]
        cases += [Case(seq_len, few, batch=2), Case(seq_len, few, (7, 1)), Case(seq_len, {**few, **KEEP_ALL[name]})]
        cases += [Case(length, {**few, "layout": "zigzag"}, (2, 1)) for length in (1, 63, 65)]
    return cases + [Case(1000, {**FEW["moba"], "chunk": 16}, (2, 1)), Case(1000, FEW["xattention"], (2, 1))]


def pairs_of(index, layout: Layout, rank: int, rows: int) -> torch.Tensor:
    """bool [B, N, rows, padded_len]: pairs of the first rows of a rank with the keys of the whole sequence."""
    starts = torch.arange(0, layout.padded_len, layout.block, dtype=torch.int32)
    pairs = block_mask(index.blocks(index.starts, starts, diagonal=False), rows, layout.padded_len)
    positions, keys = layout.positions(rank)[:rows, None], torch.arange(layout.padded_len)
    return pairs | ((keys // layout.block == positions // layout.block) & (keys <= positions))


def check_case(case: Case, parts: list[dict]) -> None:
    single, layout = Operator(case.config, Ring.single(), "cpu"), parts[0]["layout"]
    expected = with_grads(single, *case.inputs())
    alone = Layout(seq_len=case.seq_len, block=layout.block)
    mask = pairs_of(single.last[0][0], alone, 0, case.seq_len)[..., : case.seq_len]
    found = [
        pairs_of(part["index"], layout, rank, layout.local_len)[..., : case.seq_len] for rank, part in enumerate(parts)
    ]
    assert torch.equal(layout.unshard(found, 2), mask), "the ranks keep other pairs"
    got = {name: layout.unshard([part[name] for part in parts]) for name in RESULTS}
    floor = 1.0 if case.seq_len == 1 else 0.0
    assert_close(got, expected, 1e-5, floor=floor)
    ref = reference(*case.inputs(), mask)
    del ref["lse"]
    assert_close(got, ref, 1e-5, floor=floor)
    if any(case.settings.get(name) == value for keep in KEEP_ALL.values() for name, value in keep.items()):
        assert torch.equal(mask, torch.ones_like(mask).tril())
    elif case.seq_len > 200:
        assert mask.float().mean() < 0.4, "nearly dense: the case tests too little"
    check_stats(case, parts, found)


def check_stats(case: Case, parts: list[dict], found: list[torch.Tensor]) -> None:
    layout = parts[0]["layout"]
    for rank, (part, pairs) in enumerate(zip(parts, found, strict=True)):
        assert not any(part["store"].values())
        positions = layout.positions(rank)
        real = positions < case.seq_len
        causal = (positions[real] + 1).sum().item() * case.batch * case.heads[0]
        work = pairs[:, :, real].sum().item()
        assert part["stats"]["work"][0] == work
        assert part["stats"]["density"][0] == pytest.approx(work / max(causal, 1), rel=1e-9)
        assert part["stats"]["capped"][0] == 0


RINGS = [(2, {}), (3, {}), (4, {}), (4, {"inner": 2}), (4, {"inner": 2, "mode": "gather"})]


@pytest.mark.parametrize(("world", "levels"), RINGS, ids=str)
def test_ring_is_one_device(world, levels):
    cases = combinations(world)
    results = run_workers(partial(run_cases, **levels), world, cases)
    for i, case in enumerate(cases):
        try:
            check_case(case, [result[i] for result in results])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def run_checkpointed(rank: int, world: int, pattern: str) -> None:
    case, ring = Case(64 * world + 5, FEW[pattern]), Ring.create(world)
    layout, results = Layout.of(case.config, case.seq_len, world), []
    g = torch.Generator().manual_seed(1)
    x, weight = (layout.shard(torch.randn(1, case.seq_len, 32, generator=g), rank) for _ in range(2))
    for checkpointing in ({}, {"use_reentrant": False}):
        op = Operator(case.config, ring, "cpu")
        model = Layers(lambda q, k, v, layer, op=op: op(q, k, v, layer=layer, seq_len=case.seq_len), **checkpointing)
        results.append(grads(model, (model(x) * weight).sum()))
        assert is_empty(op)
    assert_same_bits(results[1], results[0])


@ON_PATTERNS
def test_checkpointing_on_a_ring_changes_no_bit(pattern):
    run_workers(run_checkpointed, 2, pattern)


@ON_PATTERNS
def test_checkpointing_changes_no_bit_and_builds_once(pattern, monkeypatch):
    results, built, build = [], [], PATTERNS[pattern].build
    monkeypatch.setattr(PATTERNS[pattern], "build", lambda *args: (built.append(1), build(*args))[1])
    for checkpointing in ({}, {"use_reentrant": False}):
        built.clear()
        op = Operator(AttentionConfig(block=16, **FEW[pattern]), Ring.single(), "cpu")
        model = Layers(op, **checkpointing)
        results.append(grads(model, model(inputs(seq_len=200)).square().mean()))
        assert len(built) == 3 and is_empty(op)
        assert op.last[0][0].density(200).item() < 0.9
    assert_same_bits(results[1], results[0])


@ON_PATTERNS
def test_dense_layers_and_short_sequences_stay_dense(pattern):
    q, k, v, _ = make_qkv(200)

    def run(layer=0, **settings):
        return Operator(AttentionConfig(block=16, **settings), Ring.single(), "cpu")(q, k, v, layer=layer)

    few = FEW[pattern]
    dense, sparse = run(pattern="dense"), run(**few)
    assert rms_ratio(sparse, dense) > 0.05
    assert torch.equal(run(1, **few, dense_layers=(1,)), dense) and torch.equal(run(**few, dense_layers=(1,)), sparse)
    assert torch.equal(run(**few, dense_below=201), dense) and torch.equal(run(**few, dense_below=200), sparse)


@ON_PATTERNS
def test_a_ring_step_of_a_rank_on_triton(pattern):
    """Lists and attention by kernels, interpreted: queries of rank 1 against the keys of ranks 0 and 1."""
    if torch.cuda.is_available():
        pytest.skip("Triton is compiled here: the test on a GPU covers it")
    layout = Layout(seq_len=100, world=2, block=16, kind="contiguous")
    config = AttentionConfig(block=16, layout="contiguous", **{**FEW[pattern], "chunk": 16})
    q, k, v, dout = make_qkv(100, 2, 1)
    whole = Operator(config, Ring.single(), "cpu")
    whole(q, k, v)
    index = whole.last[0][0]
    own = slice(layout.local_blocks, len(index.starts))
    bits = None if index.row_bits is None else index.row_bits[:, :, layout.local_len :]
    index = type(index)(mask=index.mask[:, :, own], starts=index.starts[own], block=16, span=index.span, row_bits=bits)
    for source in (0, 1):
        keys = slice(source * layout.local_len, (source + 1) * layout.local_len)
        k_starts = layout.block_starts(source)[: -(-min(layout.local_len, 100 - keys.start) // 16)]
        blocks = replace(
            index.blocks(index.starts, k_starts, diagonal=source == 1),
            by_query=triton_lists.mask_lists(index.mask, index.starts, k_starts, index.span, 1),
            by_key=triton_lists.mask_lists(index.mask, k_starts, index.starts, index.span, -1),
        )
        part = q[:, layout.local_len :], k[:, keys], v[:, keys], dout[:, layout.local_len :]
        case = KernelCase(part[0].shape[1], 2, 1, dim=16, block=16)
        assert_close(*both(*[kernels.load("triton")] * 2, part, (blocks, None), case), 1e-5)


@pytest.mark.gpu
@ON_PATTERNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(pattern, dtype):
    """The index of the CPU, its lists by kernels, the reference's results, and no wait for the device."""
    settings = {**FEW[pattern], "block": 64, "stride": 16, "chunk": 192}
    q, k, v, dout = make_qkv(2000, 4, 2, 64, batch=2, dtype=dtype)
    op = Operator(AttentionConfig(**settings), Ring.single(), "cuda")
    assert op.choice()[0] == "triton"
    on_gpu = [x.cuda() for x in (q, k, v, dout)]
    got = with_grads(op, *on_gpu)
    index, place = op.last[0][0], Place(Layout(seq_len=2000, block=64), Ring.single())
    expected = PATTERNS[pattern].build(q, k, place, op.config, 64**-0.5)
    assert (index.mask.cpu() != expected.mask).float().mean() < 1e-3  # scores that nearly tie
    blocks = block_lists(index, index.starts, index.starts, diagonal=True)
    plain = index.blocks(index.starts, index.starts, diagonal=True)
    for made, stated in ((blocks.by_query, plain.by_query), (blocks.by_key, plain.by_key)):
        assert torch.equal(made.to_mask(32), stated.to_mask(32))
    ref = reference(*on_gpu, block_mask(blocks, 2000, 2000))
    del ref["lse"]
    assert_close(got, ref, 1e-5 if dtype == torch.float32 else 5e-3)
    with never_waiting():
        op(*on_gpu[:3])
