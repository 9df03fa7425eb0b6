"""Column gradients find their rows: the kernel against plain sums, and against the CPU's own scatter."""

import pytest
import torch
from helpers import make_index, rms_ratio
from kernel_cases import ON_DEVICES

from mtraining_nns.ops.columns import Columns
from mtraining_nns.ops.config import LAYOUTS
from mtraining_nns.ops.index import NO_COLUMN
from mtraining_nns.ops.kernels.triton_columns import add_rows, gather_rows
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Ring


@ON_DEVICES
@pytest.mark.parametrize("heads,kv_heads,batch", [(4, 2, 2), (3, 1, 1), (2, 2, 1), (7, 1, 1)])
@pytest.mark.parametrize("world", [1, 3])
def test_every_gradient_reaches_its_token(device, heads, kv_heads, batch, world):
    """Heads of a group share tokens: columns of a short sequence collide."""
    layout = Layout(seq_len=100, world=world, block=16)
    index = make_index(100, heads, 16, batch=batch, columns=40, blocks=layout.global_blocks, device=device)
    columns = Columns(index.columns, layout, Ring(rank=world - 1, ranks=(0,)))
    grads = torch.randn(2, *columns.position.shape, 16, device=device)
    wide = torch.randn(2, batch, layout.local_len + 5, kv_heads, 16, device=device)  # rows in front, as cute has them
    dkv = wide[:, :, 5:]
    expected, front = dkv.cpu().clone(), wide[:, :, :5].clone()
    positions = layout.positions(world - 1).tolist()
    for b in range(batch):
        for n in range(heads):
            for c in range(int(index.columns.count[b, n])):
                token = int(index.columns.position[b, n, c])
                if token in positions:
                    expected[:, b, positions.index(token), n * kv_heads // heads] += grads[:, b, n, c].cpu()
    add_rows(grads, columns.position, columns.own, 16, dkv)
    assert rms_ratio(dkv, expected) < 1e-6
    assert torch.equal(wide[:, :, :5], front)


@ON_DEVICES
@pytest.mark.parametrize("kind", LAYOUTS)
def test_ranks_fetch_their_own_rows(device, kind):
    """Over all ranks every column is there once, and nothing else."""
    world, dim = 3, 16
    layouts = [Layout(seq_len=200, world=world, kind=kind, block=16)] * world
    index = make_index(200, 4, 16, batch=2, columns=50, blocks=layouts[0].global_blocks, device=device)
    kv = torch.randn(2, 2, 200, 2, dim).to(device)
    parts = []
    for rank, layout in enumerate(layouts):
        columns = Columns(index.columns, layout, Ring(rank=rank, ranks=(0,)))
        local = [layout.shard(x, rank) for x in kv]
        parts.append(gather_rows(columns.position, columns.own, 16, *local))
        assert torch.equal(columns.gather(*local).wait(), parts[-1])  # in plain torch on the CPU
    position = index.columns.position
    assert parts[0].shape[3] == 128 and (torch.stack(parts) != 0).any(-1).sum(0).max() == 1
    for b in range(2):
        for n in range(4):
            count = int(index.columns.count[b, n])
            rows = position[b, n, :count].long()
            assert torch.equal(sum(parts)[:, b, n, :count], kv[:, b, rows, n // 2])
            assert not sum(parts)[:, b, n, count:].any()


@ON_DEVICES
def test_half_precision_is_rounded_once_and_other_rows_stay(device):
    position = torch.tensor([[[1, 3, NO_COLUMN], [2, NO_COLUMN, NO_COLUMN]]], dtype=torch.int32, device=device)
    own = torch.zeros(1, dtype=torch.int32, device=device)
    grads = torch.full((2, 1, 2, 3, 16), 2.0**-12, device=device)
    dkv = torch.ones(2, 1, 5, 1, 16, dtype=torch.float16, device=device)
    dkv[:, :, 4] = float("nan")
    add_rows(grads, position, own, 16, dkv)
    assert (dkv[:, :, :4] == 1.0).all()  # 1 + 2**-12 rounds to 1
    assert dkv[:, :, 4].isnan().all()
    position[0, 1, 0] = 1  # both heads hold token 1: the sum counts, not each
    add_rows(grads * 3, position, own, 16, dkv)
    assert (dkv[:, 0, 1] == torch.tensor(1 + 6 * 2.0**-12, dtype=torch.float16)).all()
