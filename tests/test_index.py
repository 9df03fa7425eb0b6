"""Indices against brute force: lists, transposes, columns, densities."""

import pytest
import torch
from helpers import block_mask, column_table, index_mask, make_index

from mtraining_nns.ops.config import LAYOUTS
from mtraining_nns.ops.index import NO_COLUMN, BlockIndex, ColumnIndex, DistanceIndex
from mtraining_nns.ops.layout import Layout


def random_mask(*shape, share=0.4, seed=0):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    if mask.shape[-2] > 2:
        mask[..., 1, :], mask[..., 2, :] = False, True  # an empty and a full list
    return mask


def starts(count: int, block: int = 16) -> torch.Tensor:
    return torch.arange(0, count * block, block, dtype=torch.int32)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 7, 7), (2, 3, 5, 9), (2, 1, 9, 4)])
def test_mask_to_lists_and_back(shape):
    mask = random_mask(*shape)
    index = BlockIndex.from_mask(mask, starts(shape[2]), starts(shape[3]), 16)
    assert index.count.dtype == index.index.dtype == torch.int32
    assert index.index.shape == shape
    assert torch.equal(index.to_mask(), mask)
    for row, count, listed in zip(mask.flatten(0, 2), index.count.flatten(), index.index.flatten(0, 2)):
        assert listed[:count].tolist() == row.nonzero()[:, 0].tolist()


def test_worked_example():
    index = BlockIndex(
        count=torch.tensor([[[2, 1]]], dtype=torch.int32),
        index=torch.tensor([[[[0, 3, 0, 0], [1, 9, 9, 9]]]], dtype=torch.int32),
        q_starts=starts(2),
        k_starts=starts(4),
        block=16,
    )
    assert index.to_mask()[0, 0].nonzero().tolist() == [[0, 0], [0, 3], [1, 1]]  # entries past the count mean nothing


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 7, 7), (2, 3, 5, 9), (2, 1, 9, 4)])
def test_transpose_lists_the_query_blocks_of_each_key_block(shape):
    mask = random_mask(*shape, seed=1)
    count, listed = BlockIndex.from_mask(mask, starts(shape[2]), starts(shape[3]), 16).transpose()
    assert count.dtype == listed.dtype == torch.int32
    assert listed.is_contiguous() and listed.shape == (*shape[:2], shape[3], shape[2])
    columns = mask.transpose(-1, -2).flatten(0, 2)
    for column, length, entries in zip(columns, count.flatten(), listed.flatten(0, 2)):
        assert entries[:length].tolist() == column.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ring_steps_keep_what_the_whole_matrix_keeps(kind, world):
    layout = Layout(kind=kind, world=world, seq_len=300, block=16, granularity=32)
    index = make_index(300, 3, 16, batch=2, blocks=layout.global_blocks)
    whole = torch.zeros(2, 3, layout.global_blocks, layout.global_blocks, dtype=torch.bool)
    for i in range(layout.global_blocks):
        for j in range(i + 1):
            whole[:, :, i, j] = index.hit[:, :, i - j]
    for rank in range(world):
        for source in range(world):
            q_starts, k_starts = layout.block_starts(rank), layout.block_starts(source)
            step = index.blocks(q_starts, k_starts)
            assert torch.equal(step.to_mask(), whole[:, :, q_starts // 16][..., k_starts // 16])
            assert step.q_starts is q_starts and step.k_starts is k_starts and step.block == 16


def test_distance_example():
    hit = torch.tensor([[[True, False, True, False]]])
    mask = DistanceIndex(hit=hit, block=16).blocks(starts(4), starts(4)).to_mask()
    assert mask[0, 0].nonzero().tolist() == [[0, 0], [1, 1], [2, 0], [2, 2], [3, 1], [3, 3]]


def test_dense_keeps_every_causal_pair_and_nothing_else():
    index = DistanceIndex.dense(2, 3, 5, 16, "cpu")
    mask = block_mask(index.blocks(starts(5), starts(5)), 80, 80)
    assert torch.equal(mask, torch.ones(2, 3, 80, 80, dtype=torch.bool).tril())


def edge_columns() -> ColumnIndex:
    """Columns on the edges of blocks, an empty head, a full head."""
    lists = [[0, 15, 16, 17, 31, 32, 47, 48, 79], [], list(range(0, 80, 9)), [79]]
    position = torch.full((2, 2, 9), NO_COLUMN, dtype=torch.int32)
    for flat, chosen in zip(position.flatten(0, 1), lists):
        flat[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    count = torch.tensor([len(x) for x in lists], dtype=torch.int32).view(2, 2)
    hit = torch.rand(2, 2, 5, generator=torch.Generator().manual_seed(3)) < 0.4
    return ColumnIndex(position=position, count=count, hit=hit, block=16)


QUERY_BLOCKS = torch.tensor([0, 16, 32, 64, 96], dtype=torch.int32)  # one is missing, one is padding


def test_visible_counts_the_columns_before_each_query_block():
    columns = edge_columns()
    visible = columns.visible(QUERY_BLOCKS)
    assert visible.dtype == torch.int32
    expected = (columns.position[:, :, None] < QUERY_BLOCKS[:, None]).sum(-1)
    assert torch.equal(visible.long(), expected)


def test_seen_is_an_earlier_block_that_no_kept_block_covers():
    columns = edge_columns()
    for start in QUERY_BLOCKS[:-1].tolist():
        for b in range(2):
            for n in range(2):
                expected = []
                for c in columns.position[b, n].tolist():
                    distance = start // 16 - c // 16
                    expected.append(c != NO_COLUMN and distance > 0 and not bool(columns.hit[b, n, distance]))
                assert columns.seen(start)[b, n].tolist() == expected
        assert torch.equal(columns.seen(start), columns.seen(torch.tensor(start, dtype=torch.int32)))


@pytest.mark.parametrize("tile", [1, 2, 4, 16])
def test_first_block_comes_after_each_tiles_first_column(tile):
    columns = edge_columns()
    first = columns.first_block(QUERY_BLOCKS, tile)
    assert first.shape == (2, 2, -(-9 // tile))
    for b in range(2):
        for n in range(2):
            for t, lead in enumerate(columns.position[b, n, ::tile].tolist()):
                later = [i for i, start in enumerate(QUERY_BLOCKS.tolist()) if start > lead]
                assert first[b, n, t] == (later[0] if later else len(QUERY_BLOCKS))


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 100, 257])
def test_density_is_the_share_of_causal_pairs(seq_len):
    index = make_index(seq_len, 4, 16, batch=2, share=0.2)
    mask = index_mask(index, seq_len)
    causal = 8 * seq_len * (seq_len + 1) / 2
    assert index.density(seq_len).item() == pytest.approx(mask.sum().item() / causal, rel=1e-12)


@pytest.mark.parametrize("seq_len", [1, 63, 257])
def test_dense_has_density_one(seq_len):
    index = DistanceIndex.dense(2, 3, -(-seq_len // 16), 16, "cpu")
    assert index.density(seq_len).item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len", [2, 70, 257, 384])
def test_the_work_of_all_ranks_is_the_whole_work(kind, seq_len):
    layout = Layout(kind=kind, world=3, seq_len=seq_len, block=16, granularity=32)
    index = make_index(seq_len, 3, 16, share=0.2, blocks=layout.global_blocks)
    mask = index_mask(index, seq_len)
    for rank in range(3):
        real = layout.positions(rank)[layout.positions(rank) < seq_len]
        work = index.kept_pairs(layout.block_starts(rank), seq_len).item()
        assert work == mask[:, :, real].sum().item()


def test_moving_an_index_moves_its_tensors():
    index = make_index(100, 2, 16).to("meta")
    tensors = index.hit, index.columns.hit, index.columns.position, index.columns.count
    assert all(x.device.type == "meta" for x in tensors)
    assert DistanceIndex.dense(1, 1, 4, 16, "cpu").to("meta").columns is None


def test_makers_agree_with_the_fields():
    """The brute-force helpers of other tests, on a case small enough to read."""
    hit = torch.tensor([[[True, False, True]]])
    position = torch.tensor([[[3, 20, NO_COLUMN]]], dtype=torch.int32)
    columns = ColumnIndex(position=position, count=torch.tensor([[2]], dtype=torch.int32), hit=hit, block=16)
    assert column_table(columns, 48)[0, 0].nonzero()[:, 0].tolist() == [3, 20]
    mask = index_mask(DistanceIndex(hit=hit, block=16, columns=columns), 40)[0, 0]
    assert mask[17].nonzero()[:, 0].tolist() == [3, 16, 17]
    assert mask[33].nonzero()[:, 0].tolist() == [*range(16), 20, 32, 33]
