"""The standard pattern at S = 131072, 16/2 heads, d 128, bf16, against sampled rows computed directly in fp64."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import TOLERANCE, rms_ratio

from mtraining_nns.ops import kernels
from mtraining_nns.ops.attention import Call, Operator, _forward
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import ColumnIndex, DistanceIndex
from mtraining_nns.ops.kernels import backends
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.patterns import Place
from mtraining_nns.ops.ring import Ring
from mtraining_nns.ops.store import IndexStore

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from standard_pattern import standard_pattern  # noqa: E402

S, N, H, D, BLOCK = 131072, 16, 2, 128, 128
SAMPLES = 64
SCALE = D**-0.5

pytestmark = pytest.mark.gpu


class Standard:
    """Inputs, the index built from the pattern's lists, and the kept pairs read from those lists again."""

    def __init__(self, device="cuda"):
        g = torch.Generator(device).manual_seed(0)
        make = lambda n: torch.randn(1, S, n, D, device=device, dtype=torch.bfloat16, generator=g)  # noqa: E731
        self.q, self.k, self.v, self.dout = make(N), make(H), make(H), make(N)
        self.position, self.offsets = standard_pattern(S, N)
        hit = torch.zeros(1, N, S // BLOCK, dtype=torch.bool)
        for n, kept in enumerate(self.offsets):
            # distance d lies between blocks floor(d / BLOCK) and ceil(d / BLOCK) apart
            for distance in (kept // BLOCK, -(-kept // BLOCK)):
                hit[0, n, distance[distance < S // BLOCK]] = True
        hit, position = hit.to(device), self.position[None].to(device)
        count = torch.full((1, N), position.shape[-1], dtype=torch.int32, device=device)
        columns = ColumnIndex(position=position, count=count, hit=hit, block=BLOCK)
        self.index = DistanceIndex(hit=hit, block=BLOCK, columns=columns)
        self.device = device

    def kept(self, head: int, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        """bool: does a kept diagonal cross this pair of blocks (broadcast)? From the offsets, in tokens."""
        crossed = torch.zeros(2 * S // BLOCK, dtype=torch.bool, device=self.device)
        offsets = self.offsets[head].to(self.device)
        crossed[offsets // BLOCK] = True
        crossed[(offsets + BLOCK - 1) // BLOCK] = True
        distance = query_blocks - key_blocks
        return (distance >= 0) & crossed[distance.clamp_min(0)]

    def row_mask(self, head: int, row: int) -> torch.Tensor:
        """bool [S]: keys of one query."""
        keys = torch.arange(S, device=self.device)
        seen = self.kept(head, torch.tensor(row // BLOCK, device=self.device), keys // BLOCK)
        seen[self.position[head].long().to(self.device)] = True
        return seen & (keys <= row)

    def key_mask(self, head: int, key: int) -> torch.Tensor:
        """bool [S]: queries of one key."""
        rows = torch.arange(S, device=self.device)
        is_column = bool((self.position[head] == key).any())
        seen = self.kept(head, rows // BLOCK, torch.tensor(key // BLOCK, device=self.device))
        return (seen | is_column) & (rows >= key)


@pytest.fixture(scope="module", params=["triton", "cute"])
def case(request):
    """The operator's out, lse and gradients, and the inputs."""
    backend = request.param
    fault = backends.FAULTS[backend](kernels.Device.here("cuda"), kernels.Work(block=BLOCK))
    if fault:
        pytest.skip(fault)
    standard = Standard()
    place = Place(Layout(seq_len=S, block=BLOCK), Ring.single())
    out, lse = _forward(
        standard.q, standard.k, standard.v,
        Call(standard.index, place, kernels.load(backend), SCALE, IndexStore(), None),
    )  # fmt: skip
    operator = Operator(AttentionConfig(block=BLOCK, backend=backend), Ring.single(), "cuda")
    operator._pattern = lambda layer, layout: type("Given", (), {"build": lambda *args: standard.index})
    leaves = [x.clone().requires_grad_() for x in (standard.q, standard.k, standard.v)]
    again = operator(*leaves)
    assert torch.equal(again, out)
    again.backward(standard.dout)
    return standard, out, lse, [x.grad for x in leaves]


def sampled(seed: int, low: int = 0) -> list[int]:
    """First, last and random tokens, block edges among them."""
    g = torch.Generator().manual_seed(seed)
    edges = [low, low + 1, BLOCK - 1, BLOCK, BLOCK + 1, S - BLOCK - 1, S - BLOCK, S - 1]
    return sorted(set(edges + torch.randint(low, S, (SAMPLES - len(edges),), generator=g).tolist()))


def test_out_lse_and_dq_of_sampled_rows(case):
    standard, out, lse, (dq, _, _) = case
    got, expected = {"out": [], "lse": [], "dq": []}, {"out": [], "lse": [], "dq": []}
    for row in sampled(0):
        for head in range(N):
            seen = standard.row_mask(head, row)
            q, dout = standard.q[0, row, head].double(), standard.dout[0, row, head].double()
            k, v = (x[0, seen, head * H // N].double() for x in (standard.k, standard.v))
            scores = k @ q * SCALE
            weights = scores.softmax(0)
            direct = weights @ v
            dscores = weights * (v @ dout - direct @ dout) * SCALE
            for name, ours, theirs in (
                ("out", out[0, row, head], direct),
                ("lse", lse[0, head, row], scores.logsumexp(0)),
                ("dq", dq[0, row, head], dscores @ k),
            ):
                got[name].append(ours.double())
                expected[name].append(theirs)
    for name in got:
        tolerance = 1e-5 if name == "lse" else TOLERANCE[torch.bfloat16]
        assert rms_ratio(torch.stack(got[name]), torch.stack(expected[name])) < tolerance, name


def test_dk_and_dv_of_sampled_keys(case):
    """out and lse of every row are the operator's: the test above says that they are right."""
    standard, out, lse, (_, dk, dv) = case
    keys = sampled(1) + standard.position[3, ::101].tolist() + standard.position[12, ::101].tolist()
    delta = (standard.dout.double() * out.double()).sum(-1)[0]
    got, expected = {"dk": [], "dv": []}, {"dk": [], "dv": []}
    for key in keys:
        for kv_head in range(H):
            k, v = (x[0, key, kv_head].double() for x in (standard.k, standard.v))
            sums = torch.zeros(2, D, device="cuda", dtype=torch.double)
            for head in range(kv_head * N // H, (kv_head + 1) * N // H):
                seen = standard.key_mask(head, key)
                q, dout = standard.q[0, seen, head].double(), standard.dout[0, seen, head].double()
                weights = (q @ k * SCALE - lse[0, head, seen].double()).exp()
                dscores = weights * (dout @ v - delta[seen, head]) * SCALE
                sums += torch.stack([dscores @ q, weights @ dout])
            for name, ours, theirs in zip(("dk", "dv"), (dk, dv), sums):
                got[name].append(ours[0, key, kv_head].double())
                expected[name].append(theirs)
    for name in got:
        assert rms_ratio(torch.stack(got[name]), torch.stack(expected[name])) < TOLERANCE[torch.bfloat16], name


def test_density_is_the_documented_one(case):
    assert case[0].index.density(S).item() == pytest.approx(0.0449, abs=5e-5)
