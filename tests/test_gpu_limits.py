"""Where GPU code breaks at scale: offsets past 2^31, large grids, memory, waiting for the device, streams, chunks."""

from dataclasses import dataclass

import pytest
import torch
from direct import BLOCK, Indexed, random_inputs, results, sampled
from helpers import make_index, make_qkv, never_waiting, operator_of, rms_ratio, with_grads
from kernel_cases import module_of
from standard_pattern import pattern_index, standard_pattern

from mtraining_nns.ops import kernels, passes
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.passes import Call, set_out
from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.ring import Ring
from mtraining_nns.ops.store import IndexStore

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
GIGABYTE = 10**9
DIAGONALS = 40  # of blocks, kept on average: about 1 % of 512K tokens


@pytest.fixture(params=["triton", "cute", "cuda"])
def backend(request):
    module_of(request.param)
    return request.param


@dataclass(frozen=True)
class Shape:
    seq_len: int
    heads: int
    kv_heads: int
    dim: int = 128

    def __str__(self):
        return f"S{self.seq_len}-{self.heads}/{self.kv_heads}-d{self.dim}"


LARGE = [
    Shape(524288, 33, 11),  # q, out, dout and dq past 2^31 elements from row 508,401 on
    Shape(524288, 33, 33),  # k, v, dk and dv, too
    Shape(65535, 12, 1),
    Shape(65536, 12, 1),
    Shape(131072, 64, 8, 64),  # blocks x heads is 65536
]


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_rows_and_keys_of_large_shapes(backend, shape, poison, monkeypatch):
    monkeypatch.setattr(passes, "WORKSPACE_BYTES", 1 << 60)  # all heads in one launch
    length, heads, kv_heads = shape.seq_len, shape.heads, shape.kv_heads
    if backend == "cuda" and length * heads * shape.dim >= 1 << 31:
        pytest.skip("the cuda backend refuses it, see test_cuda_backend.py")
    index = make_index(length, heads, BLOCK, columns=200, share=DIAGONALS * BLOCK / length, device="cuda")
    case = Indexed(index, random_inputs(length, heads, kv_heads, shape.dim))
    got = results(operator_of(index, device_type="cuda", backend=backend), case.inputs)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].isfinite().all(), name
        written = (got[name] != 0).any(-1)[0]
        if name == "dq":
            written[::BLOCK] = True  # the first row of a block sees one key where no earlier one is kept, its dq is 0
        assert written.all(), f"{name} has rows that nobody wrote"
    # apart, since early rows and keys are large: they would hide errors of the late ones
    early, late = sampled(length, 16), sampled(length, 16, low=length - length // 33)
    columns = case.columns(0).tolist()[::-40]
    for rows in (early, late):
        case.check_rows(got, rows, {0, heads // 2, heads - 1})
    for keys in (early, late, columns):
        case.check_keys(got, keys, {0, kv_heads - 1})


def peak_bytes(run) -> tuple:
    """(result, most bytes held at once while it was made, beside what was held before)."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    return result, torch.cuda.max_memory_allocated() - before


def test_the_index_of_524288_tokens_fits_a_gigabyte(backend):
    """The estimate, and the lists of a forward pass as the operator makes them."""
    q, k, *_ = random_inputs(524288, 28, 4, 128)
    place, scale = Place(Layout(seq_len=q.shape[1], block=BLOCK), Ring.single()), q.shape[3] ** -0.5
    index, build_bytes = peak_bytes(lambda: vertical_slash.build(q, k, place, AttentionConfig(), scale))
    heads_at_once = []

    def read_lists(q, keys):
        """In place of a kernel."""
        heads_at_once.append(q.shape[2])
        assert {x.dtype for x in (*keys.blocks.by_query, index.columns.position)} == {torch.int32}

    module = kernels.load(backend)
    call = Call(index, place, module, scale, 0, IndexStore(), None)
    columns = call.gather(call.rows(), k, k)()
    start = set_out(q, k, k, place, module, 0, block=BLOCK, dense=False, columns=index.columns.position.shape[-1])

    def all_lists():
        for hop in start.journey:
            heads = start.chunks[hop.piece].heads
            read_lists(q[:, :, heads], call.keys(start, hop, lambda: columns, heads))

    _, lists_bytes = peak_bytes(all_lists)
    assert build_bytes < GIGABYTE and lists_bytes < GIGABYTE, (build_bytes, lists_bytes, heads_at_once)
    assert sum(heads_at_once) == 28 and len(heads_at_once) > 1


def test_backward_holds_no_keys_of_every_query_head(backend):
    """Beside the gradients and an fp32 accumulator of dQ: less than 1.5 times compact fp32 dK and dV."""
    q, k, v, dout = random_inputs(131072, 28, 4, 128)
    index = pattern_index(*standard_pattern(131072, 28), 131072)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = operator_of(index, device_type="cuda", backend=backend)(*leaves)
    grads, peak = peak_bytes(lambda: torch.autograd.grad(out, leaves, dout))
    assert all(x.dtype == BF16 for x in grads)
    accumulator = 0 if backend == "triton" else 4 * q.numel()  # triton sums dQ in registers
    workspace = peak - sum(x.nbytes for x in grads) - accumulator
    assert workspace < 1.5 * 4 * (k.numel() + v.numel()), f"{workspace / 1e6:.0f} MB"


def test_nothing_waits_for_the_device(backend):
    operator = Operator(AttentionConfig(backend=backend), Ring.single(), "cuda")
    inputs = make_qkv(8192, 8, 2, 128, dtype=BF16, device="cuda")
    with_grads(operator, *inputs)  # compiles, and copies the layout's tables
    with never_waiting():
        got = with_grads(operator, *inputs)
    assert all(x.isfinite().all() for x in got.values())


def assert_same(got: dict, expected: dict, backend: str) -> None:
    """To the bit, but for gradients that are added in any order."""
    for name, x in expected.items():
        if backend != "triton" and name != "out":
            assert rms_ratio(got[name], x) < 1e-3, name
        else:
            assert torch.equal(got[name], x), name


def test_kernels_run_on_the_current_stream(backend):
    """Inputs are NaN until a stream that sleeps first has filled them: any other stream would read them too early."""
    operator = Operator(AttentionConfig(backend=backend), Ring.single(), "cuda")
    inputs = make_qkv(8192, 8, 2, 128, dtype=BF16, device="cuda")
    expected = with_grads(operator, *inputs)
    late = [torch.full_like(x, torch.nan) for x in inputs]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2 * 10**9)  # about a second
        for target, source in zip(late, inputs):
            target.copy_(source)
        got = with_grads(operator, *late)
        assert not stream.query(), "the sleep was over before all kernels were launched: the test proves nothing"
    torch.cuda.synchronize()
    assert_same(got, expected, backend)


def test_heads_in_chunks_give_the_same(backend, monkeypatch):
    # so few columns that Triton shares their queries among as many programs either way, and sums in one order
    index = make_index(1000, 8, BLOCK, columns=300, device="cuda")
    operator = operator_of(index, device_type="cuda", backend=backend)
    inputs = make_qkv(1000, 8, 4, 128, dtype=BF16, device="cuda")
    expected = with_grads(operator, *inputs)
    monkeypatch.setattr(passes, "WORKSPACE_BYTES", 1)
    assert_same(with_grads(operator, *inputs), expected, backend)
