"""Inputs, indices and error measures that the operator's tests share.

Masks are built here by brute force from what index fields are documented to mean, not by calling the index.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import NO_COLUMN, BlockIndex, ColumnIndex, DistanceIndex
from mtraining_nns.ops.reference import masked_attention
from mtraining_nns.ops.ring import Ring

NAMES = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}


def rms(x) -> float:
    return x.double().square().mean().sqrt().item()


def rms_ratio(x, ref, floor: float = 0.0) -> float:
    """rms(x - ref) / max(rms(ref), floor); NaN, which is below no tolerance, if x or ref holds one."""
    x, ref = x.double().cpu(), ref.double().cpu()
    assert x.shape == ref.shape, (x.shape, ref.shape)
    return ((x - ref).square().mean().sqrt() / max(rms(ref), floor)).item()


def row_ratio(x, ref, floor: float = 0.0) -> float:
    """The worst row: max over rows of rms(x - ref) / max(rms of the row of ref, rms of ref, floor)."""
    x, ref = x.double().cpu(), ref.double().cpu()
    assert x.shape == ref.shape, (x.shape, ref.shape)
    error = (x - ref).square().mean(-1).sqrt()
    size = ref.square().mean(-1).sqrt().clamp_min(max(rms(ref), floor))
    return (error / size).max().item()


def assert_close(got: dict, ref: dict, tolerance: float, *, measure=rms_ratio, floor: float = 0.0) -> None:
    """Every result of `ref` within tolerance, and lse -inf in the same rows.

    floor: smallest size that errors of dq and dk are compared with; needed at S = 1 only, where both are exactly zero.
    """
    assert got.keys() == ref.keys()
    for name, expected in ref.items():
        found, expected = got[name].double().cpu(), expected.double().cpu()
        if name == "lse":
            seen = expected.isfinite()
            assert torch.equal(found == -torch.inf, ~seen), "other rows saw nothing"
            found, expected = found[seen], expected[seen]
        least = floor if name in ("dq", "dk") else 0.0
        if not expected.any() and not least:
            assert not found.any(), f"{name} should be exactly zero"
            continue
        allowed = min(tolerance, 1e-5) if name == "lse" else tolerance  # lse is fp32 for every input
        error = measure(found, expected, least)
        assert error < allowed, f"{name}: error {error:.2e}, tolerance {allowed:.0e}"


def make_qkv(seq_len, heads=4, kv_heads=2, dim=16, *, batch=1, dtype=torch.float32, device="cpu", seed=0):
    """q, k, v, dout; some keys are larger than others, so that attention is neither uniform nor one-hot."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(batch, seq_len, n, dim, generator=g) for n in (heads, kv_heads, kv_heads, heads))
    k = k * (0.5 + 2 * torch.rand(batch, seq_len, kv_heads, 1, generator=g))
    return tuple(x.to(device, dtype) for x in (q, k, v, dout))


def make_index(seq_len, heads, block, *, batch=1, columns=20, share=0.4, device="cpu", seed=0, blocks=None):
    """Random DistanceIndex: each head its own diagonals and its own number of columns, one head without any."""
    g = torch.Generator().manual_seed(seed)
    blocks = blocks or -(-seq_len // block)
    hit = torch.rand(batch, heads, blocks, generator=g) < share
    hit[..., 0] = True
    columns = min(columns, seq_len)
    width = columns + 3  # entries past every count
    position = torch.full((batch, heads, width), NO_COLUMN, dtype=torch.int32)
    count = torch.randint(0, columns + 1, (batch, heads), generator=g, dtype=torch.int32)
    count[:, 0], count[:, -1] = columns, 0 if heads > 1 else columns
    for b in range(batch):
        for n in range(heads):
            chosen = torch.randperm(seq_len, generator=g)[: count[b, n]].sort().values
            position[b, n, : count[b, n]] = chosen.int()
    hit, position, count = hit.to(device), position.to(device), count.to(device)
    return DistanceIndex(
        hit=hit, block=block, columns=ColumnIndex(position=position, count=count, hit=hit, block=block)
    )


def index_mask(index: DistanceIndex, seq_len: int) -> torch.Tensor:
    """bool [B, N, S, S] on the CPU: the pairs that a DistanceIndex keeps."""
    hit = index.hit.cpu()
    rows, cols = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    distance = rows // index.block - cols // index.block
    mask = hit[..., distance.clamp_min(0)]
    if index.columns is not None:
        mask = mask | column_table(index.columns, seq_len)[:, :, None, :]
    return mask & (cols <= rows)


def column_table(columns: ColumnIndex, seq_len: int) -> torch.Tensor:
    """bool [B, N, S]: whether a key is a column."""
    table = torch.zeros(*columns.count.shape, seq_len, dtype=torch.bool)
    for b, n in torch.cartesian_prod(*(torch.arange(x) for x in columns.count.shape)).view(-1, 2).tolist():
        table[b, n, columns.position[b, n, : int(columns.count[b, n])].long().cpu()] = True
    return table


def block_mask(index: BlockIndex, q_len: int, k_len: int) -> torch.Tensor:
    """bool [B or 1, N or 1, Sq, Sk] on the CPU: the pairs that a BlockIndex keeps, row bits and causality included."""
    count, lists = (x.cpu() for x in index.by_query)
    batch, heads = count.shape[:2] if index.row_bits is None else index.row_bits.shape[:2]
    count, lists = count.expand(batch, heads, -1), lists.expand(batch, heads, -1, -1)
    mask = torch.zeros(batch, heads, q_len, k_len, dtype=torch.bool)
    bits = None if index.row_bits is None else index.row_bits.cpu()
    q_starts, k_starts = index.q_starts.tolist(), index.k_starts.tolist()
    for b in range(batch):
        for n in range(heads):
            for i, q_start in enumerate(q_starts):
                listed = lists[b, n, i, : count[b, n, i]].tolist()
                assert all(k_starts[j] < q_start for j in listed) and listed == sorted(set(listed))
                for j in listed + [i] * index.diagonal:
                    rows = torch.arange(i * index.block, min((i + 1) * index.block, q_len))
                    cols = torch.arange(j * index.block, min((j + 1) * index.block, k_len))
                    seen = (k_starts[j] + cols - cols[0])[None] <= (q_start + rows - rows[0])[:, None]
                    if bits is not None:
                        word, bit = divmod(k_starts[j] // index.row_chunk, 32)
                        seen = seen & ((bits[b, n, rows, word] >> bit) & 1).bool()[:, None]
                    mask[b, n, rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1] = seen
    return mask


def reference(q, k, v, dout, mask, scale=None) -> dict:
    """out, lse, dq, dk, dv of the fp32 reference."""
    q, k, v = (x.detach().float().clone().requires_grad_() for x in (q, k, v))
    out, lse = masked_attention(q, k, v, mask.to(q.device), scale)
    grads = torch.autograd.grad(out, (q, k, v), dout.float())
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads)))


def exact(q, k, v, dout, mask) -> dict:
    """out, dq, dk, dv in fp64, for the worst row: there the fp32 reference's own rounding takes half the tolerance."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("bnqk,bknd->bqnd", weights, v.repeat_interleave(group, 2))
    return {"out": out.detach(), **dict(zip(NAMES[2:], torch.autograd.grad(out, (q, k, v), dout.double())))}


def with_grads(fn, q, k, v, dout) -> dict:
    """out, dq, dk, dv of fn(q, k, v)."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = fn(q, k, v)
    return {"out": out.detach(), **dict(zip(NAMES[2:], torch.autograd.grad(out, (q, k, v), dout)))}


def operator_of(index: DistanceIndex, ring=None, device_type="cpu", **config) -> Operator:
    """An Operator whose pattern is the given index."""
    operator = Operator(AttentionConfig(block=index.block, **config), ring or Ring.single(), device_type)
    operator._pattern = lambda layer, layout: SimpleNamespace(build=lambda *args: index)
    return operator


@contextmanager
def never_waiting():
    """A host that waits for the device is an error."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def poisoned(make):
    """torch.empty or torch.empty_like whose memory is NaN."""

    def filled(*args, **kwargs):
        x = make(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    return filled
