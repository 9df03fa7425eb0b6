"""Compiled kernels against the reference, poisoned memory and all. The cases of test_kernels.py, larger.

A backend may be chosen for a head dim, a ratio of heads and a block only because these tests pass for it.
"""

import os
import subprocess
import sys
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import torch
from helpers import (
    TOLERANCE,
    assert_close,
    index_mask,
    make_index,
    make_qkv,
    operator_of,
    reference,
    rms_ratio,
    with_grads,
)
from kernel_cases import BACKENDS, Case, both, check, check_own_first, fault, module_of, with_row_bits

from mtraining_nns import environment
from mtraining_nns.ops import kernels
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import DistanceIndex
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.reference import causal_mask
from mtraining_nns.ops.ring import Ring

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
RATIOS = ((8, 8), (14, 2), (28, 4), (16, 2), (9, 3), (40, 8), (32, 8), (4, 2), (6, 1), (12, 1), (32, 2))
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 257, 1000, 4095)
RESULTS = ("out", "dq", "dk", "dv")


def shared_cases():
    """What every fast backend does: 16 bits, blocks of 128."""
    for dtype in (BF16, FP16):
        for dim in (64, 128):
            yield Case(257, 4, 2, dim, 128, 2, dtype, device="cuda")
            yield Case(700, 4, 2, dim, 128, dtype=dtype, steps=2, device="cuda")
    for heads, kv_heads in RATIOS:
        for dim in (64, 128):
            yield Case(300, heads, kv_heads, dim, 128, dtype=BF16, device="cuda")
            yield Case(512, heads, kv_heads, dim, 128, dtype=BF16, columns=3, device="cuda")
    for seq_len in LENGTHS:
        yield Case(seq_len, 2, 1, 128, 128, dtype=BF16, columns=100, device="cuda")
        yield Case(seq_len, 3, 1, 64, 128, dtype=BF16, columns=140, device="cuda")
    yield Case(257, 4, 2, 64, 128, dtype=BF16, columns=0, device="cuda")
    yield Case(1000, 4, 2, 128, 128, dtype=BF16, columns=400, share=0.0, device="cuda")
    yield Case(4095, 4, 2, 128, 128, dtype=BF16, columns=1000, share=0.1, batch=2, device="cuda")


def triton_cases():
    for dim in (64, 128):
        yield Case(257, 4, 2, dim, 64, 2, BF16, device="cuda")
        for block in (64, 128):
            yield Case(257, 4, 2, dim, block, 2, FP32, device="cuda")
    for seq_len in LENGTHS:
        yield Case(seq_len, 2, 1, 128, 64, dtype=FP32, columns=100, device="cuda")
    yield Case(600, 2, 1, 128, 256, dtype=BF16, device="cuda")
    yield Case(257, 2, 1, 16, 16, dtype=FP16, device="cuda")
    yield Case(257, 2, 1, 32, 32, dtype=FP32, device="cuda")
    for dim, block in ((64, 64), (128, 128)):
        yield Case(4500, 2, 1, dim, block, dtype=BF16, row_chunk=block, share=0.2, device="cuda")
        yield Case(500, 2, 1, dim, block, dtype=FP32, row_chunk=2 * block, columns=0, device="cuda")


@BACKENDS
@pytest.mark.parametrize("case", list(shared_cases()), ids=str)
def test_backend_is_the_reference(backend, case):
    check(module_of(backend, dtype=case.dtype), case)


@pytest.mark.parametrize("programs", [1, 20, 1 << 30])
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
@pytest.mark.parametrize("dim", [64, 128])
def test_cute_folds_heads(programs, heads, kv_heads, dim, monkeypatch):
    """All of a group, some where it can be cut, none; a ragged end; with columns, without, and in two hops."""
    module = module_of("cute", heads=heads, kv_heads=kv_heads, head_dim=dim)
    monkeypatch.setattr(module, "FOLDED_PROGRAMS", programs)
    for columns, steps in ((150, 1), (0, 1), (10, 2)):
        check(module, Case(500, heads, kv_heads, dim, 128, columns=columns, steps=steps, dtype=BF16, device="cuda"))


@pytest.mark.parametrize("backend", ["triton", "cute"])
@pytest.mark.parametrize(("world", "rank"), [(2, 1), (3, 0)])
@pytest.mark.parametrize("programs", [1, 1 << 30])
def test_own_keys_before_those_of_other_ranks(backend, world, rank, programs, monkeypatch):
    module = module_of(backend)
    if backend == "cute":
        monkeypatch.setattr(module, "FOLDED_PROGRAMS", programs)
    for batch, heads, kv_heads, dim in ((1, 16, 2, 128), (2, 6, 2, 64)):
        case = Case(768 * world, heads, kv_heads, dim, 128, batch, BF16, columns=200, device="cuda")
        check_own_first(module, case, world=world, rank=rank)


@pytest.mark.parametrize("case", list(triton_cases()), ids=str)
def test_triton_is_the_reference(case):
    check(kernels.load("triton"), case)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [("torch", "triton"), ("triton", "torch"), *permutations(("triton", "cute", "cuda"), 2)],
)
def test_backends_can_be_mixed(forward, backward):
    for dim in (64, 128):
        check(module_of(forward), Case(300, 4, 2, dim, 128, dtype=BF16, device="cuda"), module_of(backward))


@BACKENDS
@pytest.mark.parametrize(("rank", "source"), [(0, 0), (1, 0), (0, 1), (2, 1)])
@pytest.mark.parametrize("bits", [0, 128])
def test_ring_steps_are_the_reference(backend, rank, source, bits):
    if bits and backend != "triton":
        pytest.skip("row bits run on triton")
    layout = Layout(seq_len=3000, world=3, block=128, granularity=256)
    index = make_index(3000, 2, 128, blocks=layout.global_blocks, device="cuda", seed=5)
    starts = layout.block_starts(rank, "cuda"), layout.block_starts(source, "cuda")
    blocks = index.blocks(*starts, diagonal=rank == source)
    inputs = make_qkv(layout.local_len, 2, 1, 128, dtype=BF16, device="cuda")
    if bits:
        blocks = with_row_bits(blocks, layout.local_len, bits)
    module = module_of(backend)
    case = Case(layout.local_len, 2, 1, 128, 128, device="cuda")
    assert_close(*both(module, module, inputs, (blocks, None), case), TOLERANCE[BF16])


@BACKENDS
@pytest.mark.parametrize(("rank", "source"), [(0, 0), (1, 0), (0, 1)])
def test_dense_ring_steps_are_the_reference(backend, rank, source):
    """Lists that all heads share."""
    layout = Layout(seq_len=2000, world=2, block=128)
    index = DistanceIndex.keep_all(2, 4, layout.global_blocks, 128, "cuda")
    starts = layout.block_starts(rank, "cuda"), layout.block_starts(source, "cuda")
    blocks = index.blocks(*starts, diagonal=rank == source)
    inputs = make_qkv(layout.local_len, 4, 2, 128, batch=2, dtype=BF16, device="cuda")
    module = module_of(backend)
    case = Case(layout.local_len, 4, 2, 128, 128, batch=2, device="cuda")
    assert_close(*both(module, module, inputs, (blocks, None), case), TOLERANCE[BF16])


@BACKENDS
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("settings", [{"pattern": "dense"}, {"p_v": 1.0, "p_s": 1.0}], ids=["dense", "keep all"])
def test_keep_all_is_dense(backend, seq_len, settings):
    module_of(backend)
    inputs = make_qkv(seq_len, 2, 1, 128, dtype=BF16, device="cuda")
    ref = reference(*inputs, causal_mask(seq_len, "cuda"))
    operator = Operator(AttentionConfig(**settings, backend=backend), Ring.single(), "cuda")
    got = with_grads(operator, *inputs)
    assert_close(got, {name: ref[name] for name in RESULTS}, TOLERANCE[BF16], floor=1.0 if seq_len == 1 else 0.0)


@pytest.mark.parametrize("first", [64, 128])
def test_two_block_sizes_in_one_process(first):
    for block in (first, 192 - first, first):
        for backend in ("triton", "cute", "cuda"):
            if not fault(backend, block=block):
                check(kernels.load(backend), Case(257, 2, 1, 64, block, dtype=BF16, device="cuda"))


@BACKENDS
@pytest.mark.parametrize("dim", [64, 128])
def test_lists_may_change_without_compiling(backend, dim, monkeypatch):
    """20 steps with other lists, counts and columns: after the second nothing is compiled."""
    module, compiled = module_of(backend), []
    if backend == "cute":
        from cutlass import cute

        compile_ = cute.compile
        monkeypatch.setattr(cute, "compile", lambda *a, **k: compiled.append(step) or compile_(*a, **k))
    else:  # block-sparse-attn is compiled when it is installed, its lists are turned around in Triton
        import triton

        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(step))
    for step in range(20):
        case = Case(1000, 4, 2, dim, 128, dtype=BF16, columns=300, share=0.1 + 0.04 * step, device="cuda")
        index = make_index(1000, 4, 128, columns=300, share=case.share, device="cuda", seed=step)
        starts = Layout(seq_len=1000, block=128).block_starts(0, "cuda")
        inputs = make_qkv(1000, 4, 2, dim, dtype=BF16, device="cuda", seed=step)
        blocks = index.blocks(starts, starts, diagonal=True)
        assert_close(*both(module, module, inputs, (blocks, index.columns), case), TOLERANCE[BF16])
    assert not [step for step in compiled if step > 1]


@BACKENDS
def test_strides_change_nothing(backend):
    """q from view and transpose, k and v cut from a fused qkv, dout with stride 0."""
    module_of(backend)
    operator = operator_of(make_index(300, 4, 128, batch=2, device="cuda"), device_type="cuda", backend=backend)
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=BF16, generator=g).transpose(1, 2)
    fused = torch.randn(2, 300, 8, 64, device="cuda", dtype=BF16, generator=g)
    views = q, fused[:, :, 2:4], fused[:, :, 5:7]
    dout = torch.ones((), device="cuda", dtype=BF16).expand(2, 300, 4, 64)

    def run(tensors, dout):
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(operator(*leaves), leaves, dout)

    expected = run([x.contiguous() for x in views], dout.contiguous())
    for got, wanted in zip(run(views, dout), expected):
        assert (
            torch.equal(got, wanted) if backend == "triton" else rms_ratio(got, wanted) < 1e-3
        )  # dQ adds in any order
    assert all(x.abs().max() > 1e-3 for x in expected)


def test_the_backward_pass_gives_one_result():
    """30 passes, one hash: nothing is added atomically."""
    index = make_index(1000, 4, 128, columns=200, device="cuda")
    operator = operator_of(index, device_type="cuda", deterministic=True)
    operator.prepare(128, 4, 2, BF16)
    assert operator.choice(1000)[0] == "triton"
    inputs = make_qkv(1000, 4, 2, 128, dtype=BF16, device="cuda")
    first = with_grads(operator, *inputs)
    for _ in range(29):
        assert all(torch.equal(x, first[name]) for name, x in with_grads(operator, *inputs).items())


def test_the_estimate_on_a_gpu_keeps_what_algorithm_1_keeps():
    """The same inputs on the CPU; scores differ in their last bits, so a pair at the edge of a budget may flip."""
    settings = {"block": 64, "p_v": 0.6, "p_s": 0.5, "local": 64, "sinks": 4}
    q, k, v, _ = make_qkv(1000, 4, 2, 64)
    masks = []
    for device in ("cpu", "cuda"):
        operator = Operator(AttentionConfig(**settings), Ring.single(), device)
        operator(*(x.to(device) for x in (q, k, v)))
        masks.append(index_mask(operator.last[0][0], 1000))
    assert masks[0].float().mean() < 0.45
    assert (masks[0] != masks[1]).float().mean() < 1e-3


FIRST_CALL = """
import sys
sys.path.insert(0, {tests!r})
from helpers import make_index, make_qkv, operator_of, with_grads
import torch
operator = operator_of(make_index(500, 4, 128, device="cuda"), device_type="cuda", backend={backend!r})
got = with_grads(operator, *make_qkv(500, 4, 2, 64, dtype=torch.bfloat16, device="cuda"))
print(got["out"].float().norm().item(), got["dk"].float().norm().item())
"""


@pytest.mark.parametrize("backend", ["triton", "cute"])
def test_processes_compile_into_one_empty_cache(backend, own_tmp):
    module_of(backend)
    environment.prepare_caches()
    code = FIRST_CALL.format(tests=str(Path(__file__).parent), backend=backend)
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [start([sys.executable, "-c", code]) for _ in range(16)]
    results = [process.communicate(timeout=300) for process in processes]
    assert not [errors for process, (_, errors) in zip(processes, results) if process.returncode]
    assert len({printed for printed, _ in results}) == 1, "the processes computed different numbers"
    assert any((own_tmp / f"mtraining-{os.getuid()}" / backend).iterdir())
