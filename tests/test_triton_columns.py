"""Column gradients find their rows: the kernel against plain sums, and against the CPU's own scatter."""

import pytest
import torch
from helpers import make_index, rms_ratio
from kernel_cases import ON_DEVICES

from mtraining_nns.ops.columns import Columns
from mtraining_nns.ops.kernels.triton_columns import add_rows
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
    grads = torch.randn(2, *columns.row.shape, 16, device=device)
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
    add_rows(grads, columns.row, columns.mine, dkv)
    assert rms_ratio(dkv, expected) < 1e-6
    assert torch.equal(wide[:, :, :5], front)


@ON_DEVICES
def test_half_precision_is_rounded_once_and_other_rows_stay(device):
    row = torch.tensor([[[1, 3, 0]], [[2, 0, 0]]], device=device).view(1, 2, 3)
    mine = torch.tensor([[True, True, False], [True, False, False]], device=device)[None]
    grads = torch.full((2, 1, 2, 3, 16), 2.0**-12, device=device)
    dkv = torch.ones(2, 1, 5, 1, 16, dtype=torch.float16, device=device)
    dkv[:, :, 4] = float("nan")
    add_rows(grads, row, mine, dkv)
    assert (dkv[:, :, :4] == 1.0).all()  # 1 + 2**-12 rounds to 1
    assert dkv[:, :, 4].isnan().all()
    row[0, 1, 0] = 1  # both heads hold token 1: the sum counts, not each
    add_rows(grads * 3, row, mine, dkv)
    assert (dkv[:, 0, 1] == torch.tensor(1 + 6 * 2.0**-12, dtype=torch.float16)).all()
