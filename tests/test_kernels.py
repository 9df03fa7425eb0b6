"""Every kernel backend against the reference: on the CPU plain torch, and Triton's device code through its interpreter.

The interpreter takes milliseconds a tile, so its cases are short; the same checks run on a GPU in test_kernels_gpu.py.
Its bf16 dot products are wrong, hence fp32 and fp16 only.
"""

import pytest
import torch
from helpers import assert_close, make_index, make_qkv, rms_ratio
from kernel_cases import Case, both, check, check_own_first, dense_index, with_row_bits

from mtraining_nns.ops import kernels
from mtraining_nns.ops.index import BlockIndex
from mtraining_nns.ops.kernels import GatheredColumns, Keys, Tape
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.merge import Partial

if torch.cuda.is_available():
    pytest.skip("Triton is compiled here: test_kernels_gpu.py covers it", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("poison")
FP16, BF16 = torch.float16, torch.bfloat16
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])

SHORT = [
    Case(1, 2, 1, dim=16, block=16),
    Case(24, 4, 2, dim=16, block=16, batch=2, columns=6),
    Case(65, 2, 1, dim=32, block=32),
    Case(130, 2, 1, dim=64, block=64),
    Case(129, 1, 1, dim=128, block=128),
    Case(40, 3, 1, dim=16, block=16, steps=2),
    Case(20, 7, 1, dim=16, block=16, columns=6),
    Case(20, 8, 1, dim=16, block=16, columns=0),
    Case(40, 3, 3, dim=16, block=16, columns=0),
    Case(65, 1, 1, dim=16, block=16, columns=40, share=0.0),
    Case(50, 2, 1, dim=16, block=32, scale=0.7),
    Case(129, 2, 1, dim=64, block=64, dtype=FP16),
    Case(40, 2, 1, dim=16, block=16, row_chunk=16),
    Case(70, 1, 1, dim=16, block=16, row_chunk=32, dtype=FP16, columns=0),
]
LONG = [Case(s, dim=d, block=b) for s in (63, 64, 127, 128, 257, 1000) for d, b in ((64, 64), (128, 128))]
LONG += [Case(257, n, h, d, dtype=BF16) for n, h in ((14, 2), (28, 4), (16, 2), (9, 3), (8, 8)) for d in (64, 128)]
LONG += [Case(512, 2, 1, 16, block=256), Case(300, batch=3, dtype=BF16, steps=2)]
LONG += [Case(1200, 2, 1, 16, block=16, row_chunk=16, share=0.2), Case(200, 2, 1, 64, row_chunk=128, dtype=BF16)]


@BACKENDS
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_backend_is_the_reference(backend, case):
    check(kernels.load(backend), case)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_torch_is_the_reference_at_every_shape(case):
    check(kernels.load("torch"), case)


@BACKENDS
@pytest.mark.parametrize(("rank", "source", "bits"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 0, 16), (2, 2, 16)])
def test_ring_steps_are_the_reference(backend, rank, source, bits):
    """Queries of one rank against keys of another: local places say nothing about positions.

    40 chunks of 16 tokens, so that row bits need a second word.
    """
    layout = Layout(seq_len=640, world=8, block=16)
    index = make_index(640, 2, 16, blocks=layout.global_blocks, seed=5)
    blocks = index.blocks(layout.block_starts(rank), layout.block_starts(source), diagonal=rank == source)
    q, k, v, dout = make_qkv(layout.local_len, 2, 1)
    if bits:
        blocks = with_row_bits(blocks, layout.local_len, bits)
        assert blocks.row_bits.shape[-1] == 2 and blocks.by_query.count[:, :, -1].min() + blocks.diagonal > 1
    case = Case(layout.local_len, 2, 1, dim=16, block=16)
    assert_close(*both(*[kernels.load(backend)] * 2, (q, k, v, dout), (blocks, None), case), 1e-5)


@BACKENDS
@pytest.mark.parametrize(("world", "rank"), [(2, 1), (3, 0)])
def test_own_keys_before_those_of_other_ranks(backend, world, rank):
    check_own_first(kernels.load(backend), Case(96, 4, 2, dim=16, block=16), world=world, rank=rank)


@BACKENDS
def test_columns_of_a_shard_of_queries(backend):
    """Queries of rank 1 of 2 against all keys and the columns of the whole sequence."""
    layout = Layout(seq_len=128, world=2, block=16, granularity=32)
    index = make_index(128, 2, 16, columns=30, share=0.2)
    starts = layout.block_starts(1), Layout(seq_len=128, block=16).block_starts(0)
    blocks = index.blocks(*starts, diagonal=False)
    q, _, _, dout = make_qkv(layout.local_len, 2, 1)
    _, k, v, _ = make_qkv(128, 2, 1, seed=1)
    case = Case(128, 2, 1, dim=16, block=16)
    assert_close(*both(*[kernels.load(backend)] * 2, (q, k, v, dout), (blocks, index.columns), case), 1e-5)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, FP16])
def test_a_dq_carry_is_added_in_fp32_and_rounded_once(backend, dtype):
    q, k, v, dout = make_qkv(40, 2, 1)
    index, module = make_index(40, 2, 16, share=0.2), kernels.load(backend)
    starts = Layout(seq_len=40, block=16).block_starts(0)
    gathered = torch.randn(2, 1, 2, 128, 16)
    columns = GatheredColumns(gathered, index.columns.tiles(starts))
    keys = Keys(k, v, index.blocks(starts, starts, diagonal=True), columns)
    tape = Tape(dout, torch.randn(q.shape), torch.full((1, 2, 40), 3.0), 0.25)
    carry = torch.full(q.shape, 7.0)
    alone = module.backward(q, keys, tape, carry=module.begin(q, tape)).dq
    into = torch.empty(q.shape, dtype=dtype)
    added = module.backward(q, keys, tape, carry=carry, into=into).dq
    assert added is into and alone.abs().max() > 0.1 and torch.equal(carry, torch.full(q.shape, 7.0))
    assert torch.equal(added, (alone + 7.0).to(dtype))


def sparse_lists(seq_len=80, block=16) -> BlockIndex:
    """Query blocks 0, 2 and 4 see nothing, and no block its own."""
    starts = Layout(seq_len=seq_len, block=block).block_starts(0)
    mask = torch.zeros(1, 2, len(starts), len(starts), dtype=torch.bool)
    mask[:, :, 1, 0] = mask[:, :, 3, 0] = mask[:, :, 3, 2] = True
    mask[:, 1, 3, 2] = False
    return BlockIndex.of(mask, starts, starts, block, diagonal=False)


@BACKENDS
def test_rows_that_see_nothing_give_zero(backend):
    blocks, module = sparse_lists(), kernels.load(backend)
    inputs = make_qkv(80, 2, 1)
    inputs[0][:, 20] = 0  # a query of zeros sees keys, all alike
    got, ref = both(module, module, inputs, (blocks, None), Case(80, 2, 1, dim=16, block=16))
    assert_close(got, ref, 1e-5)
    empty = torch.cat([torch.arange(0, 16), torch.arange(32, 48), torch.arange(64, 80)])
    assert (got["lse"][..., empty] == -torch.inf).all() and (got["out"][:, empty] == 0).all()
    assert (got["dq"][:, empty] == 0).all()
    assert all(got[name].isfinite().all() for name in ("dq", "dk", "dv"))


@BACKENDS
def test_row_bits_can_blind_a_row(backend):
    starts = Layout(seq_len=48, block=16).block_starts(0)
    blocks = with_row_bits(make_index(48, 2, 16, share=1.0).blocks(starts, starts, diagonal=True), 48, 16)
    module = kernels.load(backend)
    got, ref = both(module, module, make_qkv(48, 2, 1), (blocks, None), Case(48, 2, 1, dim=16, block=16))
    assert_close(got, ref, 1e-5)
    assert (got["out"][:, ::9] == 0).all() and (got["lse"][..., ::9] == -torch.inf).all()


@BACKENDS
def test_a_carry_survives_empty_lists_and_fills_empty_rows(backend):
    blocks, module = sparse_lists(), kernels.load(backend)
    q, k, v, _ = make_qkv(80, 2, 1)
    carry = Partial(torch.randn(q.shape), torch.randn(1, 2, 80) * 3)
    carry.out[:, ::5], carry.lse[:, :, ::5] = 0, -torch.inf
    alone = module.forward(q, Keys(k, v, blocks), scale=0.25)
    kept = Partial(*(x.clone() for x in carry))
    merged = module.forward(q, Keys(k, v, blocks), scale=0.25, carry=carry)
    assert torch.equal(carry.out, kept.out) and torch.equal(carry.lse, kept.lse), "the carry was written to"
    none = alone.lse == -torch.inf
    assert torch.equal(merged.lse == -torch.inf, none & (carry.lse == -torch.inf))
    rows = none.transpose(1, 2) & carry.lse.isfinite().transpose(1, 2)
    assert rms_ratio(merged.out[rows], carry.out[rows]) < 1e-6
    rows = (carry.lse == -torch.inf).transpose(1, 2)
    assert rms_ratio(merged.out[rows], alone.out[rows]) < 1e-6


@BACKENDS
def test_lse_is_a_natural_logarithm(backend):
    q, k, v, _ = make_qkv(50, 2, 1)
    starts = Layout(seq_len=50, block=32).block_starts(0)
    keys = Keys(k, v, dense_index(50, 2, 32).blocks(starts, starts, diagonal=True))
    part = kernels.load(backend).forward(q, keys, scale=0.25)
    scores = torch.einsum("bqnd,bkhd->bnqk", q, k) * 0.25
    future = torch.ones(50, 50, dtype=torch.bool).triu(1)
    assert rms_ratio(part.lse, torch.logsumexp(scores.masked_fill(future, -torch.inf), -1)) < 1e-6


@pytest.mark.parametrize("forward,backward", [("torch", "triton"), ("triton", "torch")])
def test_backends_can_be_mixed(forward, backward):
    check(kernels.load(forward), Case(50, 2, 1, dim=16, block=32), backward=kernels.load(backward))


@BACKENDS
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_scores_of_any_size(backend, size):
    """Nearly uniform and nearly one-hot attention; exponents that would overflow without a maximum."""
    q, k, v, dout = make_qkv(70, 2, 1)
    case, module = Case(70, 2, 1, dim=16, block=32), kernels.load(backend)
    starts = Layout(seq_len=70, block=32).block_starts(0)
    blocks = make_index(70, 2, 32).blocks(starts, starts, diagonal=True)
    got, ref = both(module, module, (q * size, k * size, v, dout), (blocks, None), case)
    assert size < 1 or ref["lse"].max() > 1000
    assert_close(got, ref, max(1e-5, ref["lse"].abs().max().item() * 2**-22))  # what fp32 resolves beside such scores


@BACKENDS
def test_fp16_out_is_rounded_once(backend):
    """Where out goes changes the last store alone."""
    q, k, v, _ = make_qkv(70, 2, 1, dtype=FP16)
    starts = Layout(seq_len=70, block=32).block_starts(0)
    blocks = make_index(70, 2, 32).blocks(starts, starts, diagonal=True)
    run, keys = kernels.load(backend).forward, Keys(k, v, blocks)
    wide, narrow = run(q, keys, scale=0.25), run(q, keys, scale=0.25, into=torch.empty_like(q))
    assert wide.out.dtype == torch.float32 and torch.equal(wide.out.half(), narrow.out)


@BACKENDS
def test_non_contiguous_inputs(backend):
    """Views of fused and transposed tensors give the bits of their contiguous copies."""
    fused = torch.randn(2, 4, 70, 16)  # [B, N + 2H, S, D]
    q, k, v = fused[:, :2].transpose(1, 2), fused[:, 2:3].transpose(1, 2), fused[:, 3:].transpose(1, 2)
    starts = Layout(seq_len=70, block=32).block_starts(0)
    blocks = make_index(70, 2, 32, batch=2).blocks(starts, starts, diagonal=True)
    run = kernels.load(backend).forward
    got = run(q, Keys(k, v, blocks), scale=0.25)
    expected = run(q.contiguous(), Keys(k.contiguous(), v.contiguous(), blocks), scale=0.25)
    assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


def test_triton_refuses_what_it_cannot_do():
    module = kernels.load("triton")
    q, k, v, _ = make_qkv(64, 2, 1, dim=80)
    starts = Layout(seq_len=64, block=32).block_starts(0)
    with pytest.raises(ValueError, match="head dims .* got 80.*torch"):
        module.forward(q, Keys(k, v, dense_index(64, 2, 32).blocks(starts, starts, diagonal=True)), scale=1.0)
