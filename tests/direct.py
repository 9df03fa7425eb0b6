"""Attention of single rows and keys of long sequences, directly in fp64, where no whole reference would fit.

    case = Indexed(index, random_inputs(524288, 33, 3, 128))
    got = results(operator_of(index, device_type="cuda", backend="triton"), case.inputs)
    case.check_rows(got, sampled(524288, 20), heads=range(33))
    case.check_keys(got, sampled(524288, 20), kv_heads=range(3))

Rows are computed from the inputs alone. Keys take the operator's own out and lse of every row, which the check of rows
says are right.
"""

from itertools import product

import torch
from helpers import NAMES, TOLERANCE, assert_close

from mtraining_nns.ops.index import NO_COLUMN, DistanceIndex

BLOCK = 128


class Direct:
    """Inputs q, k, v, dout of one sequence; a subclass says which keys a row sees and which rows see a key."""

    def __init__(self, inputs):
        self.q, self.k, self.v, self.dout = self.inputs = inputs
        self.group, self.scale = self.q.shape[2] // self.k.shape[2], self.q.shape[3] ** -0.5
        self.tokens = torch.arange(self.q.shape[1], device=self.q.device)

    def row_mask(self, head: int, row: int) -> torch.Tensor:
        """bool [S]: keys of one query."""
        raise NotImplementedError

    def key_mask(self, head: int, key: int) -> torch.Tensor:
        """bool [S]: queries of one key."""
        raise NotImplementedError

    def row(self, head: int, row: int) -> dict:
        """out and dq [D], lse []."""
        seen = self.row_mask(head, row)
        q, dout = self.q[0, row, head].double(), self.dout[0, row, head].double()
        k, v = (x[0, seen, head // self.group].double() for x in (self.k, self.v))
        scores = k @ q * self.scale
        weights = scores.softmax(0)
        out = weights @ v
        dscores = weights * (v @ dout - out @ dout) * self.scale
        return {"out": out, "lse": scores.logsumexp(0), "dq": dscores @ k}

    def key(self, kv_head: int, key: int, out, lse) -> dict:
        """dk and dv [D]."""
        k, v = (x[0, key, kv_head].double() for x in (self.k, self.v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(kv_head * self.group, (kv_head + 1) * self.group):
            seen = self.key_mask(head, key)
            q, dout, own = (x[0, seen, head].double() for x in (self.q, self.dout, out))
            weights = (q @ k * self.scale - lse[0, head, seen].double()).exp()
            dk += weights * (dout @ v - (dout * own).sum(-1)) * self.scale @ q
            dv += weights @ dout
        return {"dk": dk, "dv": dv}

    def check_rows(self, got: dict, rows, heads) -> None:
        """out, lse and dq of some rows are right."""
        pairs = list(product(rows, heads))
        found = [
            {"out": got["out"][0, row, n], "lse": got["lse"][0, n, row], "dq": got["dq"][0, row, n]} for row, n in pairs
        ]
        _check(found, [self.row(n, row) for row, n in pairs], self.q.dtype)

    def check_keys(self, got: dict, keys, kv_heads) -> None:
        """dk and dv of some keys are right."""
        pairs = list(product(keys, kv_heads))
        found = [{name: got[name][0, key, h] for name in ("dk", "dv")} for key, h in pairs]
        _check(found, [self.key(h, key, got["out"], got["lse"]) for key, h in pairs], self.q.dtype)


class Indexed(Direct):
    """What a DistanceIndex is documented to keep."""

    def __init__(self, index: DistanceIndex, inputs):
        super().__init__(inputs)
        self.index = index

    def columns(self, head: int) -> torch.Tensor:
        """int64 [count]."""
        position = self.index.columns.position[0, head]
        return position[position != NO_COLUMN].long()

    def row_mask(self, head, row):
        seen = self.index.hit[0, head, (row // BLOCK - self.tokens // BLOCK).clamp_min(0)]
        seen[self.columns(head)] = True
        return seen & (self.tokens <= row)

    def key_mask(self, head, key):
        seen = self.index.hit[0, head, (self.tokens // BLOCK - key // BLOCK).clamp_min(0)]
        return (seen | (self.columns(head) == key).any()) & (self.tokens >= key)


def random_inputs(seq_len: int, heads: int, kv_heads: int, dim: int, device="cuda", dtype=torch.bfloat16) -> tuple:
    """q, k, v, dout, made on the device: they are large."""
    g = torch.Generator(device).manual_seed(0)
    counts = heads, kv_heads, kv_heads, heads
    return tuple(torch.randn(1, seq_len, n, dim, device=device, dtype=dtype, generator=g) for n in counts)


def results(operator, inputs) -> dict:
    """out, lse, dq, dk, dv of the operator."""
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = operator(*leaves)
    lse = out.grad_fn.saved_tensors[4]
    return dict(zip(NAMES, (out.detach(), lse, *torch.autograd.grad(out, leaves, dout))))


def sampled(seq_len: int, count: int, *, seed: int = 0, low: int = 0) -> list[int]:
    """First, last and random tokens from `low` on, block edges among them."""
    g = torch.Generator().manual_seed(seed)
    ends = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, seq_len - BLOCK - 1, seq_len - BLOCK, seq_len - 1]
    edges = [token for token in ends if low <= token < seq_len]
    return sorted(set(edges + torch.randint(low, seq_len, (count - len(edges),), generator=g).tolist()))


def _check(found: list[dict], expected: list[dict], dtype: torch.dtype) -> None:
    got, ref = ({name: torch.stack([x[name] for x in part]) for name in part[0]} for part in (found, expected))
    assert_close(got, ref, TOLERANCE[dtype])
