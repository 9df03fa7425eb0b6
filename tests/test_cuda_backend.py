"""What only the cuda backend has: lists turned around, flash-attn where every block is kept, sizes it refuses."""

import pytest
import torch
from helpers import TOLERANCE, assert_close, make_index, make_qkv
from kernel_cases import Case, both, dense_index, module_of, with_row_bits

from mtraining_nns.ops import kernels
from mtraining_nns.ops.index import Lists
from mtraining_nns.ops.layout import Layout

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
BF16 = torch.bfloat16


@pytest.fixture
def cuda():
    return module_of("cuda")


@pytest.mark.parametrize("seq_len", [1, 65, 128, 1000, 4095])
@pytest.mark.parametrize("flash", [True, False], ids=["flash-attn", "block-sparse-attn"])
def test_dense_is_the_reference(cuda, seq_len, flash, monkeypatch):
    if flash and not cuda.HAS_FLASH_ATTN:
        pytest.skip("needs flash-attn")
    monkeypatch.setattr(cuda, "HAS_FLASH_ATTN", flash)
    starts = Layout(seq_len=seq_len, block=128).block_starts(0, "cuda")
    blocks = dense_index(seq_len, 4, 128, "cuda").blocks(starts, starts, diagonal=True)
    assert blocks.dense
    inputs = make_qkv(seq_len, 4, 2, 128, batch=2, dtype=BF16, device="cuda")
    floor = inputs[3].float().square().mean().sqrt().item() if seq_len == 1 else 0.0
    case = Case(seq_len, 4, 2, 128, 128, 2, BF16, device="cuda")
    assert_close(*both(cuda, cuda, inputs, (blocks, None), case), TOLERANCE[BF16], floor=floor)


def test_rows_are_walked_backwards(cuda):
    mask = torch.tensor([[[[0, 0, 0], [1, 0, 0], [1, 1, 0]]]], dtype=torch.bool, device="cuda")
    lists, by_key = Lists.of(mask), Lists.of(mask.transpose(-1, -2))
    own = cuda.descending(lists, True, own_first=True)
    assert own.tolist() == [[[[0, -1, -1], [1, 0, -1], [2, 1, 0]]]]
    assert cuda.descending(lists, False, own_first=True).tolist() == [[[[-1, -1, -1], [0, -1, -1], [1, 0, -1]]]]
    assert cuda.descending(by_key, True, own_first=False).tolist() == [[[[2, 1, 0], [2, 1, -1], [2, -1, -1]]]]


def test_what_the_packages_cannot_do_is_refused(cuda):
    starts = Layout(seq_len=300, block=128).block_starts(0, "cuda")
    blocks = make_index(300, 4, 128, device="cuda").blocks(starts, starts, diagonal=True)
    q, k, v, _ = make_qkv(300, 4, 2, 64, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="attention.backend=triton"):
        cuda.forward(q, kernels.Keys(k, v, with_row_bits(blocks, 300, 128)), scale=0.1)
    far_apart = torch.empty_strided(q.shape, (1, 1 << 23, 64, 1), dtype=BF16, device="meta")
    with pytest.raises(ValueError, match="fewer than 2.31 elements .* got 300 tokens"):
        cuda.forward(far_apart, kernels.Keys(k, v, blocks), scale=0.1)
