"""What a kernel backend must do, as data and as a check: every case has a reference by an explicit mask.

    case = Case(seq_len=257, heads=4, kv_heads=2)
    check(kernels.load("triton"), case)           out, lse, dq, dk, dv of blocks and columns together

Blocks and columns are two sets of keys of one softmax, so the reference attends to the keys and the gathered columns
laid end to end.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from helpers import TOLERANCE, assert_close, block_mask, index_mask, make_index, make_qkv, reference

from mtraining_nns.ops import kernels
from mtraining_nns.ops.columns import Columns
from mtraining_nns.ops.index import BlockIndex, DistanceIndex, Lists
from mtraining_nns.ops.kernels import Device, GatheredColumns, Keys, Tape, Work, backends
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Ring

# Of tests that call kernels themselves: interpreted on the CPU, unless they can be compiled.
compiled = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is compiled here: the cuda cases cover it")
DEVICES = [pytest.param("cpu", marks=compiled), pytest.param("cuda", marks=pytest.mark.gpu)]
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)
BACKENDS = pytest.mark.parametrize("backend", ["triton", "cute", "cuda"])  # of CUDA devices


@dataclass(frozen=True)
class Case:
    seq_len: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block: int = 64
    batch: int = 1
    dtype: torch.dtype = torch.float32
    columns: int = 20  # 0: blocks alone
    share: float = 0.4  # of the block diagonals
    steps: int = 1  # 2: the blocks come in two calls, the second carries the first and brings the columns
    row_chunk: int = 0  # tokens a row bit stands for, 0: no row bits
    device: str = "cpu"
    scale: float | None = None

    def __str__(self):
        shape = f"S{self.seq_len}-{self.heads}/{self.kv_heads}-d{self.dim}-b{self.block}x{self.batch}"
        extra = f"c{self.columns}-{self.steps}-r{self.row_chunk}-{self.share}"
        return f"{shape}-{str(self.dtype)[6:]}-{extra}"


def fault(backend: str, **work) -> str:
    """Why a backend cannot be tested here, "" if it can."""
    return backends.FAULTS[backend](Device.here("cuda", backend), Work(**{"block": 128, **work}))


def module_of(backend: str, **work):
    """The module of a backend; skips the test where it cannot run."""
    if why := fault(backend, **work):
        pytest.skip(why)
    return kernels.load(backend)


def check(backend, case: Case, backward=None) -> None:
    """Blocks and columns of a random index, forward and backward, against the reference."""
    index = make_index(
        case.seq_len, case.heads, case.block, batch=case.batch, columns=case.columns, share=case.share,
        device=case.device, seed=case.seq_len,
    )  # fmt: skip
    layout = Layout(seq_len=case.seq_len, block=case.block)
    starts = layout.block_starts(0, case.device)
    blocks = index.blocks(starts, starts, diagonal=True)
    if case.row_chunk:
        blocks = with_row_bits(blocks, case.seq_len, case.row_chunk)
    inputs = make_qkv(
        case.seq_len, case.heads, case.kv_heads, case.dim, batch=case.batch, dtype=case.dtype, device=case.device,
        seed=case.heads,
    )  # fmt: skip
    columns = index.columns if case.columns else None
    got, ref = both(backend, backward or backend, inputs, (blocks, columns), case)
    assert got["out"].dtype == got["dq"].dtype == case.dtype and got["lse"].dtype == torch.float32
    floor = inputs[3].float().square().mean().sqrt().item() if case.seq_len == 1 else 0.0
    assert_close(got, ref, TOLERANCE[case.dtype], floor=floor)


def both(backend, backward, inputs, kept: tuple, case: Case) -> tuple[dict, dict]:
    """Results of the kernels and of the reference for one set of blocks and, unless None, columns."""
    q, k, v, dout = inputs
    blocks, columns = kept
    scale = case.dim**-0.5 if case.scale is None else case.scale
    gathered, table = torch.zeros(2, *q.shape[:1], q.shape[2], 0, case.dim, dtype=k.dtype, device=k.device), None
    if columns is not None:
        # a ring of one that holds all keys, whatever part of the queries this is
        whole = Layout(seq_len=k.shape[1], block=case.block)
        gathered = Columns(columns, whole, Ring.single()).gather(k, v).wait()
        table = columns_mask(columns, blocks.q_starts, q.shape[1])
        table = torch.nn.functional.pad(table, (0, gathered.shape[3] - table.shape[-1]))
    ref = concatenated(q, (k, v), dout, (block_mask(blocks, q.shape[1], k.shape[1]), table), gathered, scale)
    columns = columns and GatheredColumns(gathered, columns.tiles(blocks.q_starts))
    steps = [Keys(k, v, blocks, columns)] if case.steps == 1 else dealt(k, v, blocks, columns)
    return run(backend, backward, q, steps, dout, scale), ref


def check_own_first(backend, case: Case, *, world: int, rank: int) -> None:
    """Queries of one rank against the keys of all, its own first, and the columns."""
    layout = Layout(seq_len=case.seq_len, block=case.block, world=world)
    assert layout.padded_len == case.seq_len
    index = make_index(
        case.seq_len, case.heads, case.block, batch=case.batch, columns=case.columns, share=case.share,
        device=case.device,
    )  # fmt: skip
    inputs = make_qkv(
        case.seq_len, case.heads, case.kv_heads, case.dim, batch=case.batch, dtype=case.dtype, device=case.device
    )
    q, dout = (layout.shard(inputs[i], rank) for i in (0, 3))
    order = [(rank - j) % world for j in range(world)]
    k, v = (torch.cat([layout.shard(x, source) for source in order], 1) for x in inputs[1:3])
    starts = [layout.block_starts(source, case.device) for source in order]
    blocks = index.blocks(starts[0], torch.cat(starts), diagonal=True)
    gathered = Columns(index.columns, Layout(seq_len=case.seq_len, block=case.block), Ring.single())
    columns = GatheredColumns(gathered.gather(*inputs[1:3]).wait(), index.columns.tiles(starts[0]))
    rows, cols = layout.positions(rank), torch.cat([layout.positions(source) for source in order])
    mask = index_mask(replace(index, columns=None), case.seq_len)[..., rows, :][..., cols]
    table = columns_mask(index.columns, starts[0], q.shape[1])
    table = torch.nn.functional.pad(table, (0, columns.kv.shape[3] - table.shape[-1]))
    ref = concatenated(q, (k, v), dout, (mask, table), columns.kv, case.dim**-0.5)
    got = run(backend, backend, q, [Keys(k, v, blocks, columns)], dout, case.dim**-0.5)
    assert_close(got, ref, TOLERANCE[case.dtype])


def run(backend, backward, q, steps: list[Keys], dout, scale) -> dict:
    """out, lse and gradients of a forward and a backward pass of so many calls."""
    part = None
    for keys in steps:
        into = among_others(q) if keys is steps[-1] else None
        part = backend.forward(q, keys, scale=scale, carry=part, into=into)
    tape, dkv = Tape(dout, part.out.contiguous(), part.lse, scale), 0
    dq = backward.begin(q, tape)
    for keys in steps:
        into = among_others(q) if keys is steps[-1] else None
        dq, found, last = backward.backward(q, keys, tape, carry=dq, into=into)
        dkv = dkv + found.float()
    got = {"out": part.out, "lse": part.lse, "dq": dq, "dk": dkv[0], "dv": dkv[1]}
    return got if last is None else got | {"dk columns": last[0], "dv columns": last[1]}


def among_others(q) -> torch.Tensor:
    """Room for q's heads between others, poisoned."""
    heads = q.shape[2]
    return torch.full((*q.shape[:2], heads + 2, q.shape[3]), torch.nan, dtype=q.dtype, device=q.device)[:, :, 1:-1]


def dealt(k, v, blocks: BlockIndex, columns) -> list[Keys]:
    """The same keys in two steps: odd key blocks, then the others with the diagonal and the columns."""
    mask = blocks.by_query.to_mask(len(blocks.k_starts))
    odd = torch.arange(mask.shape[-1], device=mask.device) % 2 == 1
    halves = [
        replace(
            blocks, by_query=Lists.of(part), by_key=Lists.of(part.transpose(-1, -2)), diagonal=diagonal, dense=False
        )
        for part, diagonal in ((mask & odd, False), (mask & ~odd, blocks.diagonal))
    ]
    return [Keys(k, v, halves[0]), Keys(k, v, halves[1], columns)]


def concatenated(q, kv, dout, masks, gathered, scale) -> dict:
    """Reference over keys and gathered columns laid end to end, its gradients taken apart again."""
    mask, table = masks
    group = q.shape[2] // kv[0].shape[2]
    k, v = (torch.cat([x.repeat_interleave(group, 2), g.transpose(1, 2)], 1) for x, g in zip(kv, gathered))
    joined = mask if table is None else torch.cat([mask, table], -1)
    ref = reference(q, k, v, dout, joined, scale)
    length = kv[0].shape[1]
    parts = {name: ref[name][:, length:].transpose(1, 2) for name in ("dk", "dv")}
    for name in ("dk", "dv"):
        ref[name] = ref[name][:, :length].unflatten(2, (-1, group)).sum(3)
    if table is not None:
        ref |= {"dk columns": parts["dk"], "dv columns": parts["dv"]}
    return ref


def columns_mask(columns, q_starts, q_len: int) -> torch.Tensor:
    """bool [B, N, Sq, C]: a later block than the column's, not covered by a kept block."""
    position, hit = columns.position.cpu().long(), columns.hit.cpu()
    valid = torch.arange(position.shape[-1]) < columns.count.cpu()[..., None]
    block_of_row = q_starts.cpu().long().repeat_interleave(columns.block)[:q_len] // columns.block
    distance = block_of_row[:, None] - position[:, :, None] // columns.block
    covered = hit[:, :, None].expand(-1, -1, q_len, -1).gather(-1, distance.clamp(0, hit.shape[-1] - 1))
    return (distance > 0) & ~covered & valid[:, :, None]


def with_row_bits(blocks: BlockIndex, k_len: int, row_chunk: int) -> BlockIndex:
    """The same lists with random bits for each query row, bit 31 of a word and rows without any bit among them."""
    batch, heads = blocks.by_query.count.shape[:2]
    words = -(-(int(blocks.k_starts.max()) + blocks.block) // row_chunk // 32)
    g = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (batch, heads, k_len, max(words, 1)), generator=g).int()
    bits[:, :, ::9] = 0
    bits[:, :, 1::9] = -1
    return replace(blocks, row_bits=bits.to(blocks.k_starts.device), row_chunk=row_chunk)


def dense_index(seq_len: int, heads: int, block: int, device="cpu") -> DistanceIndex:
    return DistanceIndex.keep_all(1, heads, -(-seq_len // block), block, device)
