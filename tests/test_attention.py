"""The operator on one rank: autograd, shapes of real models, strides, settings, errors, statistics."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    TOLERANCE,
    assert_close,
    exact,
    index_mask,
    make_index,
    make_qkv,
    operator_of,
    reference,
    rms_ratio,
    row_ratio,
    with_grads,
)
from kernel_cases import ON_DEVICES

from mtraining_nns.ops import attention, kernels, passes
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import NO_COLUMN, ColumnIndex, DistanceIndex
from mtraining_nns.ops.kernels import load
from mtraining_nns.ops.reference import causal_mask, vertical_slash_mask
from mtraining_nns.ops.ring import Ring

HEADS = [(14, 2), (28, 4), (40, 8), (16, 2), (32, 8), (9, 3), (8, 8)]
RESULTS = ("out", "dq", "dk", "dv")
FEW = {"block": 16, "budget": "fixed", "k_v": 6, "k_s": 2, "sinks": 3, "local": 16, "last_q": 8}


def operator(**settings) -> Operator:
    return Operator(AttentionConfig(**settings), Ring.single(), "cpu")


def without_lse(results: dict) -> dict:
    return {name: results[name] for name in RESULTS}


def sinks_local_verticals(seq_len, heads, block=64) -> DistanceIndex:
    """64 sinks, a local band of 128 and 3 more columns for each head."""
    hit = torch.zeros(1, heads, -(-seq_len // block), dtype=torch.bool)
    hit[..., :3] = True
    g = torch.Generator().manual_seed(heads)
    more = torch.stack([64 + torch.randperm(seq_len - 64, generator=g)[:3].sort().values for _ in range(heads)])
    position = torch.cat([torch.arange(64).expand(heads, -1), more], 1).int()[None]
    count = torch.full((1, heads), 67, dtype=torch.int32)
    columns = ColumnIndex(position=position, count=count, hit=hit, block=block)
    return DistanceIndex(hit=hit, block=block, columns=columns)


@pytest.mark.parametrize("seq_len", [257, 512])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_of_real_models_row_by_row(heads, dim, seq_len, poison):
    index = sinks_local_verticals(seq_len, heads[0])
    inputs = make_qkv(seq_len, *heads, dim)
    ref = exact(*inputs, index_mask(index, seq_len))
    assert_close(with_grads(operator_of(index), *inputs), ref, 1e-5, measure=row_ratio)


@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("settings", [{"pattern": "dense"}, {"p_v": 1.0, "p_s": 1.0}], ids=["dense", "keep all"])
def test_keep_all_is_dense_at_odd_lengths(seq_len, settings, poison):
    inputs = make_qkv(seq_len, 2, 1, 64)
    ref = without_lse(reference(*inputs, causal_mask(seq_len)))
    got = with_grads(operator(**settings), *inputs)
    assert_close(got, ref, 1e-5, floor=1.0 if seq_len == 1 else 0.0)


def test_keep_all_is_dense_at_length_4095(poison):
    inputs = make_qkv(4095, 1, 1, 16)
    ref = without_lse(reference(*inputs, causal_mask(4095)))
    assert_close(with_grads(operator(p_v=1.0, p_s=1.0), *inputs), ref, 1e-5)


@pytest.mark.parametrize("seq_len", [1, 17, 65, 150])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_whole_operator_is_algorithm_1_and_masked_attention(seq_len, batch, poison):
    inputs = make_qkv(seq_len, 4, 2, batch=batch)
    mask = vertical_slash_mask(*inputs[:2], AttentionConfig(**FEW))
    assert seq_len < 150 or mask.float().mean() < 0.35  # dense would be 0.5
    ref = without_lse(reference(*inputs, mask))
    assert_close(with_grads(operator(**FEW), *inputs), ref, 1e-5, floor=1.0 if seq_len == 1 else 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_stays_within_its_rounding(dtype):
    index = make_index(300, 4, 16, share=0.3)
    inputs = make_qkv(300, 4, 2, 64, dtype=dtype)
    got = with_grads(operator_of(index), *inputs)
    assert all(x.dtype == dtype for x in got.values())
    assert_close(got, without_lse(reference(*inputs, index_mask(index, 300))), TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_scale_reaches_pattern_forward_and_backward(scale):
    inputs = make_qkv(100, 4, 2)
    mask = vertical_slash_mask(*inputs[:2], AttentionConfig(**FEW), scale)
    ref = without_lse(reference(*inputs, mask, scale))
    op = operator(**FEW)
    assert_close(with_grads(lambda q, k, v: op(q, k, v, scale=scale), *inputs), ref, 1e-5)


def test_strides_change_no_bit():
    """q from view and transpose, k and v cut from a fused qkv, dout with stride 0."""
    q = torch.randn(2, 4 * 100 * 16).view(2, 4, 100, 16).transpose(1, 2)
    fused = torch.randn(2, 100, 8, 16)
    k, v = fused[:, :, 2:4], fused[:, :, 5:7]
    op = operator(**FEW)

    def grads(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        assert [x.is_contiguous() for x in leaves] == [x.is_contiguous() for x in (q, k, v)]
        op(*leaves).sum().backward()
        return [x.grad for x in leaves]

    assert not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
    for got, expected in zip(grads(q, k, v), grads(*(x.contiguous() for x in (q, k, v)))):
        assert torch.equal(got, expected)
        assert got.abs().max() > 1e-3


def test_heads_in_chunks_give_the_same(monkeypatch):
    op, inputs, heads = operator_of(make_index(100, 6, 16, batch=2)), make_qkv(100, 6, 3, batch=2), []
    module = load("torch")
    for name in ("forward", "backward"):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda q, *a, run=run, **k: heads.append(q.shape[2]) or run(q, *a, **k))
    expected = with_grads(op, *inputs)
    monkeypatch.setattr(passes, "WORKSPACE_BYTES", 1)
    assert_close(with_grads(op, *inputs), expected, 1e-6)
    assert heads == [6] * 2 + [2, 2, 2] * 2


def test_gradients_of_some_inputs_only():
    q, k, v, dout = make_qkv(100)
    op = operator(**FEW)
    whole = with_grads(op, q, k, v, dout)
    for wanted in ("dq", "dk", "dv"):
        leaves = [x.clone().requires_grad_(f"d{n}" == wanted) for n, x in zip("qkv", (q, k, v))]
        op(*leaves).backward(dout)
        grads = {f"d{n}": x.grad for n, x in zip("qkv", leaves)}
        assert torch.equal(grads.pop(wanted), whole[wanted])
        assert set(grads.values()) == {None}


def test_gradients_against_finite_differences():
    """Independent of every formula: the derivative along a random direction, the index held."""
    index = make_index(60, 4, 16, share=0.3)
    q, k, v, dout = make_qkv(60)
    op, grads = operator_of(index), with_grads(operator_of(index), q, k, v, dout)
    step, g = 1e-2, torch.Generator().manual_seed(3)
    for i, name in enumerate(("dq", "dk", "dv")):
        direction = torch.randn((q, k, v)[i].shape, generator=g)
        moved = [[x + s * step * direction if j == i else x for j, x in enumerate((q, k, v))] for s in (1, -1)]
        slope = ((op(*moved[0]).double() - op(*moved[1]).double()) * dout).sum() / (2 * step)
        grad = grads[name].double()
        # over all directions the slope is about as large as the gradient's norm; a single one may be near zero
        assert abs(slope.item() - (grad * direction).sum().item()) < 2e-3 * grad.norm().item()


@pytest.mark.parametrize("heads", [(7, 2), (2, 4), (4, 0), (0, 2)])
def test_heads_that_form_no_groups_are_refused_before_a_step(heads):
    with pytest.raises(ValueError, match=f"got {heads[0]} query heads, {heads[1]} key heads"):
        operator().prepare(64, *heads, torch.float32)


def test_a_second_derivative_is_refused():
    """It would be wrong: the saved log-sum-exp is no part of the graph."""
    q, k, v, _ = make_qkv(40)
    q.requires_grad_()
    for loss in (torch.sum, lambda out: out.square().sum()):  # its own gradient needs none, or one
        with pytest.raises(RuntimeError, match="no second derivative, got .* create_graph=True"):
            torch.autograd.grad(loss(operator(**FEW)(q, k, v)), q, create_graph=True)


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash", "xattention", "moba"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_bit(default, pattern):
    inputs = make_qkv(100, dtype=torch.float16)
    op = operator(**FEW, pattern=pattern, stride=4, threshold=0.5, chunk=16, top_k=2)
    expected = with_grads(op, *inputs)
    torch.set_default_dtype(default)
    try:
        got = with_grads(op, *inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash", "xattention", "moba"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@ON_DEVICES
def test_a_diverged_run_gives_nan_and_no_crash(device, bad, pattern):
    inputs = make_qkv(300, device=device)
    settings = FEW | {"budget": "top_p", "cap": 40}
    op = Operator(AttentionConfig(**settings, pattern=pattern, stride=4, chunk=16, top_k=2), Ring.single(), device)
    for rows in (7, slice(None), slice(290, None)):
        q, k, v, dout = (x.clone() for x in inputs)
        (k if rows == 7 else q)[:, rows] = bad
        got = with_grads(op, q, k, v, dout)
        assert got["out"].isnan().any() and got["dq"].isnan().any()
        assert 0 < op.read_stats()["density"][0] <= 1


def test_tensors_lie_where_they_may():
    """An offset of two bytes is none that a GPU reads tiles from."""
    inputs = make_qkv(60, dtype=torch.float16)
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs]
    assert all(x.data_ptr() % 16 and x.is_contiguous() for x in shifted)
    assert all(passes.aligned(x).data_ptr() % 16 == 0 for x in shifted)
    op = operator(**FEW)
    expected = with_grads(op, *inputs)
    for name, x in with_grads(op, *shifted).items():
        assert torch.equal(x, expected[name])


def test_budgets_beyond_the_sequence_need_no_more_columns_than_it_has(monkeypatch):
    asked, set_out = [], passes.set_out

    def recorded(*args, columns, **options):
        asked.append(columns)
        return set_out(*args, columns=columns, **options)

    for module in (attention, passes):
        monkeypatch.setattr(module, "set_out", recorded)
    op = operator(block=16, cap=10**6, sinks=10**6, last_q=8)
    with_grads(op, *make_qkv(100))
    assert asked == [100, 100] and op.last[0][0].columns.position.shape[-1] == 100


def test_the_forward_of_one_backend_and_the_backward_of_another(poison, monkeypatch):
    index = make_index(50, 2, 16, columns=6)
    inputs = make_qkv(50, 2, 1)
    ref = without_lse(reference(*inputs, index_mask(index, 50)))
    for forward, backward in ((load("torch"), load("triton")), (load("triton"), load("torch"))):
        mixed = SimpleNamespace(**vars(forward) | {"backward": backward.backward})
        monkeypatch.setattr(kernels, "load", lambda name, mixed=mixed: mixed)
        assert_close(with_grads(operator_of(index), *inputs), ref, 1e-5)


def test_dense_layers_and_short_sequences_stay_dense():
    q, k, v, _ = make_qkv(100)
    dense, sparse = operator(**FEW, pattern="dense")(q, k, v), operator(**FEW)(q, k, v)
    assert rms_ratio(sparse, dense) > 0.05
    chosen = operator(**FEW, dense_layers=(1, 3))
    for layer in range(5):
        assert torch.equal(chosen(q, k, v, layer=layer), dense if layer in (1, 3) else sparse)
    assert torch.equal(operator(**FEW, dense_below=101)(q, k, v), dense)
    assert torch.equal(operator(**FEW, dense_below=100)(q, k, v), sparse)


def test_statistics_of_the_last_call():
    op = operator(**{**FEW, "cap": 5, "k_v": 9}, dense_layers=(2,))
    q, k, v, _ = make_qkv(100, batch=2)
    for layer in (0, 2):
        op(q[:, :50], k[:, :50], v[:, :50], layer=layer)
        op(q, k, v, layer=layer)
    mask = vertical_slash_mask(q, k, op.config)
    stats = op.read_stats()
    assert stats["density"] == pytest.approx({0: mask.sum().item() / (8 * 5050), 2: 1.0})
    assert stats["work"] == pytest.approx({0: mask.sum().item(), 2: 8 * 5050})
    assert stats["capped"] == {0: 8, 2: 0}


def bad(q=(1, 64, 4, 16), k=(1, 64, 2, 16), v=None):
    return tuple(torch.randn(shape) for shape in (q, k, v or k))


BAD = {
    "heads are no multiple": (bad(q=(1, 64, 5, 16)), ["(1, 64, 5, 16)", "multiple"]),
    "k and v differ": (bad(v=(1, 64, 2, 8)), ["(1, 64, 2, 8)"]),
    "batch differs": (bad(k=(2, 64, 2, 16)), ["(2, 64, 2, 16)"]),
    "head dim differs": (bad(k=(1, 64, 2, 8)), ["(1, 64, 2, 8)"]),
    "lengths differ": (bad(k=(1, 63, 2, 16)), ["as many keys as queries", "(1, 63, 2, 16)"]),
    "more keys than queries": (bad(k=(1, 65, 2, 16)), ["as many keys as queries", "(1, 65, 2, 16)"]),
    "no batch": (bad(q=(64, 4, 16), k=(64, 2, 16)), ["q [B, S, N, D]", "(64, 4, 16)"]),
    "nothing": (bad(q=(0, 64, 4, 16), k=(0, 64, 2, 16)), ["none of them empty", "(0, 64, 4, 16)"]),
    "no head dim": (bad(q=(1, 64, 4, 0), k=(1, 64, 2, 0)), ["none of them empty"]),
    "whole numbers": (tuple(x.int() for x in bad()), ["torch.bfloat16", "torch.int32"]),
    "double": (tuple(x.double() for x in bad()), ["torch.bfloat16", "torch.float64"]),
    "no tensors": ((None, None, None), ["expected tensors, got NoneType"]),
    "on another device": (
        tuple(x.to("meta") for x in bad()),
        ["made for cpu tensors, all on one device, got meta, meta, meta"],
    ),
    "some elsewhere": (tuple(x.to(d) for x, d in zip(bad(), ("cpu", "meta", "cpu"))), ["got cpu, meta, cpu; move"]),
    "sparse": (tuple(x.to_sparse() for x in bad()), ["got sparse cpu, sparse cpu, sparse cpu"]),
}


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash"])
@pytest.mark.parametrize("name", BAD)
def test_wrong_shapes_name_what_was_got(name, pattern):
    tensors, words = BAD[name]
    with pytest.raises(ValueError) as error:
        operator(**FEW, pattern=pattern)(*tensors)
    assert all(word in str(error.value) for word in words)


ODD = [
    ({"scale": 0}, "scale must be a positive, finite number, got 0"),
    ({"scale": -1.0}, "scale must be"),
    ({"scale": float("inf")}, "scale must be"),
    ({"scale": float("nan")}, "scale must be"),
    ({"scale": "a"}, "scale must be a positive, finite number, got 'a'"),
    ({"scale": torch.ones(2)}, "scale must be"),
    ({"layer": -1}, "layer must be a number from 0, got -1"),
    ({"layer": "x"}, "layer must be"),
    ({"seq_len": 64.0}, "seq_len must be a whole number of tokens, got 64.0"),
]


@pytest.mark.parametrize(("odd", "message"), ODD, ids=str)
def test_odd_arguments_are_named(odd, message):
    with pytest.raises(ValueError, match=message):
        operator(**FEW)(*bad(), **odd)


def test_settings_come_as_a_config():
    with pytest.raises(TypeError, match="expected an AttentionConfig, got dict"):
        Operator({"pattern": "dense"}, Ring.single(), "cpu")
    with pytest.raises(TypeError, match=r"expected a Ring, got NoneType; Ring.single\(\)"):
        Operator(AttentionConfig(), None, "cpu")
    for device in ("gpu", "", None, "xla"):
        with pytest.raises(ValueError, match=f"of type cpu and cuda, got {device!r}"):
            Operator(AttentionConfig(), Ring.single(), device)


def test_a_ring_checks_the_shards_before_it_talks():
    op = Operator(AttentionConfig(block=16), Ring(rank=1, ranks=(0, 1)), "cpu")
    with pytest.raises(ValueError, match="ring of 2 ranks needs seq_len"):
        op(*bad())
    with pytest.raises(ValueError, match="rank 1 of 2 holds 32 tokens of a sequence of 64.*Layout.shard"):
        op(*bad(), seq_len=64)
    with pytest.raises(ValueError, match="rank 0 of 1 holds 96 tokens of a sequence of 70 .zigzag, block 16"):
        operator(block=16, layout="zigzag")(*bad(q=(1, 70, 2, 16)), seq_len=70)


CONFIG_ERRORS = [
    (
        {"pattern": "stripes"},
        "pattern must be one of dense, vertical_slash, xattention, moba, flexprefill, got 'stripes'",
    ),
    ({"threshold": 0.0}, r"threshold must lie in \(0, 1\], got 0.0"),
    ({"threshold": 1.01}, "threshold must lie"),
    ({"block": 16, "stride": 32}, "block must be a multiple of attention.stride, got block=16, stride=32"),
    ({"stride": 12}, "got block=128, stride=12"),
    ({"stride": 0}, "stride must be at least 1"),
    ({"pattern": "moba", "chunk": 200}, "chunk must be a multiple of attention.block, got chunk=200, block=128"),
    ({"pattern": "moba", "chunk": 0}, "chunk must be at least 1"),
    ({"top_k": 0}, "top_k must be at least 1"),
    ({"backend": "fast"}, "backend must be one of"),
    ({"layout": "spiral"}, "layout must be one of contiguous, zigzag, striped"),
    ({"budget": "all"}, "budget must be one of top_p, fixed"),
    ({"block": 48}, "block must be a power of two of at least 16, got 48"),
    ({"block": 8}, "got 8"),
    ({"granularity": 64, "block": 128}, "granularity=64, block=128"),
    ({"p_v": 0.0}, r"p_v must lie in \(0, 1\], got 0.0"),
    ({"p_s": 1.5}, "p_s must lie"),
    ({"cap": 0}, "cap must be at least 1"),
    ({"last_q": 0}, "last_q must be at least 1"),
    ({"local": -1}, "local must not be negative"),
    ({"dense_below": True}, "dense_below must be int or auto, got True"),
    ({"dense_below": "yes"}, "dense_below must be int or auto, got 'yes'"),
    ({"dense_layers": (-1,)}, "dense_layers must list layer numbers"),
    ({"local": 10**22}, "local must be at most 2147483647, got 10000000000000000000000"),
    ({"block": 1 << 40}, "block must be at most"),
]


@pytest.mark.parametrize(("settings", "message"), CONFIG_ERRORS, ids=str)
def test_settings_are_checked_where_they_are_made(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)


def test_one_dtype_or_autocast():
    q, k, v, dout = make_qkv(60)
    op = operator(**FEW)
    with pytest.raises(ValueError, match="got torch.float32, torch.bfloat16 and torch.float32"):
        op(q, k.bfloat16(), v)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="got torch.float64, torch.float32"):
        op(q.double(), k, v)
    with torch.autocast("cpu", torch.bfloat16):
        got = with_grads(op, q, k.bfloat16(), v, dout.bfloat16())
    assert got["out"].dtype == got["dk"].dtype == torch.bfloat16 and got["dq"].dtype == torch.float32
    assert torch.equal(got["out"], op(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_a_backend_that_cannot_run_here_is_an_error_at_start():
    with pytest.raises(ValueError, match="backend=triton cannot run: it needs a CUDA device, got cpu"):
        operator(backend="triton")


def test_entries_past_a_count_are_never_read(poison):
    """NO_COLUMN and rubbish lists change nothing."""
    index = make_index(100, 2, 16, columns=8)
    assert (index.columns.position[:, 0, 8:] == NO_COLUMN).all()
    q, k, v, dout = make_qkv(100, 2, 1)
    got = with_grads(operator_of(index), q, k, v, dout)
    assert_close(got, without_lse(reference(q, k, v, dout, index_mask(index, 100))), 1e-5)


def test_a_model_with_an_operator_is_copied_and_pickled():
    op = operator(**FEW)
    q, k, v, dout = make_qkv(100)
    expected = with_grads(op, q, k, v, dout)
    op(*(x.requires_grad_() for x in make_qkv(40)[:3]))  # a forward whose backward has not come
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert twin.config == op.config and not twin.store.pending and not twin.last
        assert_close(with_grads(twin, q, k, v, dout), expected, 1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p_v": "abc"}, r"attention.p_v must be float or int, got 'abc' \(str\)"),
        ({"block": 64.0}, r"attention.block must be int, got 64.0 \(float\)"),
        ({"last_q": True}, r"attention.last_q must be int, got True \(bool\)"),
        ({"granularity": "64"}, r"attention.granularity must be int or null, got '64' \(str\)"),
        ({"dense_layers": 3}, r"attention.dense_layers must be a list, got 3 \(int\)"),
        ({"dense_layers": ["a"]}, r"attention.dense_layers must list layer numbers"),
        ({"pattern": None}, r"attention.pattern must be str, got None"),
    ],
    ids=str,
)
def test_settings_of_a_wrong_type_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)
